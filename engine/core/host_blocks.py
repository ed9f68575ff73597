"""Owns the places in the host's memory (SWAP_SPACE) where evicted blocks are kept: which key lies where, and what has
to move before the next step. Knows no tensors and no requests, and of the cache only the numbers of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.prefix_lru import PrefixLRU
from engine.core.types import Swaps


class HostBlocks:
    """A key that is brought back keeps its place: the next time its block is evicted there is nothing to copy."""

    def __init__(self, num_places: int):
        self._free = list(range(num_places - 1, -1, -1))
        self._place_of: PrefixLRU[bytes, int] = PrefixLRU()
        self._wanted: set[int] = set()  # places that the next step reads: until then they are not written
        self._out: list[tuple[int, int]] = []  # for the next batch: block, place
        self._back: list[tuple[int, int]] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self._place_of

    @property
    def num_coming_back(self) -> int:
        return len(self._back)

    def keep(self, key: bytes, block: int) -> None:
        """`block` of the cache, with this key, will be overwritten. In the place of the one that was used least
        recently; if even that one is wanted, it is lost."""
        if key in self._place_of:
            self._place_of.use([key])
            return
        if self._free:
            place = self._free.pop()
        else:
            if next(iter(self._place_of.values())) in self._wanted:
                return
            _, place = self._place_of.evict()
        self._place_of[key] = place
        self._out.append((block, place))

    def want(self, keys: Sequence[bytes]) -> None:
        """They are here and will be brought back: whatever is evicted for them leaves them alone."""
        self._place_of.use(keys)
        self._wanted.update([self._place_of[key] for key in keys])

    def bring_back(self, key: bytes, block: int) -> None:
        """A wanted one, into a new `block`."""
        self._back.append((block, self._place_of[key]))

    def take_swaps(self) -> Swaps | None:
        """What the next step begins with."""
        if not self._out and not self._back:
            return None
        swaps = Swaps(self._out, self._back)
        self._out, self._back, self._wanted = [], [], set()
        return swaps

    def check(self) -> None:
        """Every place is free or has one key. Between two steps."""
        places = [*self._free, *self._place_of.values()]
        assert sorted(places) == list(range(len(places)))
        assert not self._wanted
