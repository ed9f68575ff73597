"""Places in the host's memory (SWAP_SPACE) that keep evicted blocks, and the swaps of the next step. Independent of
tensors and requests."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.prefix_lru import PrefixLRU
from engine.core.types import Swaps


class HostBlocks:
    """Blocks on the host by key. A block that is swapped in keeps its place, so that it need not be copied when it is
    evicted again."""

    def __init__(self, num_places: int):
        self._free = list(range(num_places - 1, -1, -1))
        self._place_of: PrefixLRU[bytes, int] = PrefixLRU()
        self._protected: set[int] = set()  # places that the next step reads, which must not be overwritten before
        self._outs: list[tuple[int, int]] = []  # for the next batch: block, place
        self._ins: list[tuple[int, int]] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self._place_of

    @property
    def num_swap_ins(self) -> int:
        """Return the number of blocks that the next step swaps in."""
        return len(self._ins)

    def awaits_swap_in(self, block: int | None) -> bool:
        """Return whether the next step swaps an entry into `block`."""
        return any(block == each for each, _ in self._ins)

    def swap_out(self, key: bytes, block: int) -> None:
        """Swap out `block`, which has this key and will be overwritten. The least recently used entry is evicted for
        it; if even that one is protected, `block` is lost."""
        if key in self._place_of:
            self._place_of.use([key])
            return
        if self._free:
            place = self._free.pop()
        else:
            if next(iter(self._place_of.values())) in self._protected:
                return
            _, place = self._place_of.evict()
        self._place_of[key] = place
        self._outs.append((block, place))

    def discard(self, key: bytes) -> None:
        """Make the entry unfindable and the next one to evict. It keeps its place until then, because the next step may
        read it."""
        if key in self._place_of:
            unused = b"discarded %d" % self._place_of[key]  # no key is so short
            self._place_of[unused] = self._place_of.pop(key)
            self._place_of.move_to_end(unused, last=False)

    def protect(self, keys: Sequence[bytes]) -> None:
        """Protect the entries of `keys`, which will be swapped in, from eviction until the next step."""
        self._place_of.use(keys)
        self._protected.update([self._place_of[key] for key in keys])

    def swap_in(self, key: bytes, block: int) -> None:
        """Swap a protected entry in, into the new `block`."""
        self._ins.append((block, self._place_of[key]))

    def take_swaps(self) -> Swaps | None:
        """Return the swaps that the next step starts with, or None."""
        if not self._outs and not self._ins:
            return None
        swaps = Swaps(self._outs, self._ins)
        self._outs, self._ins, self._protected = [], [], set()
        return swaps

    def check(self) -> None:
        """Check that each place is free or has one key. Called between two steps."""
        places = [*self._free, *self._place_of.values()]
        assert sorted(places) == list(range(len(places)))
        assert not self._protected
