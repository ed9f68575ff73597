"""Eviction order of caches whose entries are parts of prefixes: KV blocks, host blocks, prompt log-probabilities."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class PrefixLRU(OrderedDict[K, V]):
    """Entries of a cache, the next one to evict first. The least recently used entry is evicted first, and of entries
    that were used together the end of their prefix before its beginning, because a lookup needs all that precede."""

    def put(self, entries: Sequence[tuple[K, V]]) -> None:
        """Enter or replace consecutive entries of a prefix as the most recently used ones."""
        for key, value in reversed(entries):
            self[key] = value
            self.move_to_end(key)

    def use(self, keys: Sequence[K]) -> None:
        """Make the consecutive entries of a prefix the most recently used ones."""
        for key in reversed(keys):
            self.move_to_end(key)

    def evict(self) -> tuple[K, V]:
        """Remove and return the next entry to evict."""
        return self.popitem(last=False)
