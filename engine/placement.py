"""Placement of a request on one of several engines or servers, by the part of its prompt that each has cached and by
their load. What the keys of a prompt are made of is up to the caller."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

MAX_KNOWN_KEYS = 1 << 16  # of one engine or server: 4 million tokens


class KnownPrefixes:
    """Keys of the prompts that an engine or a server has computed. The least recently used ones are forgotten, as in
    its cache."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def add(self, keys: Iterable[bytes], most: int = MAX_KNOWN_KEYS) -> list[bytes]:
        """Add the keys, keep at most `most` of all, and return those that are new."""
        new = []
        for key in keys:
            if key in self._keys:
                self._keys.move_to_end(key)
            else:
                self._keys[key] = None
                new.append(key)
        while len(self._keys) > most:
            self._keys.popitem(last=False)
        return new

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget keys that have turned out not to be cached."""
        for key in keys:
            self._keys.pop(key, None)

    def count(self, chain: Sequence[bytes]) -> int:
        """Return how many of the first keys in `chain`, one for each prefix of a prompt, are known."""
        return next((i for i, key in enumerate(chain) if key not in self._keys), len(chain))

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)


def placement_cost(num_uncached: int, num_queued: int, num_running: int) -> int:
    """Return the cost of a prompt with `num_uncached` tokens to compute at an engine or server with `num_queued` tokens
    of other prompts to compute and `num_running` requests; the lowest cost is the best place."""
    return (num_uncached + num_queued) * (num_running + 1)
