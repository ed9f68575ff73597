"""Bookkeeping of a draft model's KV cache: block tables, and how many positions it has computed. Independent of tensors
on a device and of the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.core.types import Batch


class DraftCache:
    """Block tables of the draft model for each slot, and the leading positions of each block that it has computed.

    The draft model uses the block ids of the target model's full attention. So prefix hits, forks, preemption and
    replays apply to it without further work. It may have computed fewer positions of a block than the target model;
    it computes them when it drafts for a request with that block. A wrong count can only make drafts worse.
    """

    def __init__(self, num_slots: int, max_blocks: int, block_size: int, group: int):
        """Take the number of blocks of the longest request, and the index of the cache group."""
        self.tables = np.zeros((num_slots, max_blocks), np.int32)
        self.group, self._block_size = group, block_size
        self._num_blocks = [0] * num_slots
        self._num_valid = [0] * num_slots  # leading positions computed from the known tokens of the slot's request
        self._guessed: list[list[int]] = [[] for _ in range(num_slots)]  # draft tokens that are computed behind them
        self._filled = np.zeros(0, np.int32)  # leading positions of each block that are computed

    def allocate(self, num_blocks: int) -> None:
        """Forget everything, and begin with a pool of `num_blocks` empty blocks."""
        self._filled = np.zeros(num_blocks, np.int32)
        self._num_blocks = [0] * len(self.tables)

    def place(self, batch: Batch) -> list[tuple[int, int]]:
        """Take over the new requests and blocks of a step. Return the pairs of blocks that have to be copied."""
        copies = [copy for copy in batch.copies if copy.group == self.group]
        for copy in copies:
            self._filled[copy.target] = self._filled[copy.source]
        if batch.swaps:
            self._filled[[block for block, _ in batch.swaps.ins]] = 0  # only the target model's part is swapped in
        for arrival in batch.arrivals:
            self._num_blocks[arrival.slot] = self._num_valid[arrival.slot] = 0
            self._guessed[arrival.slot] = []
        for row in batch.rows:
            if row.new_block_ids and (block_ids := row.new_block_ids[self.group]):
                self._add(row.slot, row.start, block_ids)
        for copy in copies:
            self.tables[copy.slot, copy.place] = copy.target
        return [(copy.source, copy.target) for copy in copies]

    def tables_of(self, slots: Sequence[int], width: int, null_block: int) -> np.ndarray:
        """Return the first `width` columns of the block tables of slots, with `null_block` behind the blocks that a
        slot has: i32 [slots, width]."""
        tables, columns = np.full((len(slots), width), null_block, np.int32), self.tables[slots, :width]
        num_blocks = np.array([self._num_blocks[slot] for slot in slots])
        is_there = np.arange(columns.shape[1]) < num_blocks[:, None]
        tables[:, : columns.shape[1]] = np.where(is_there, columns, null_block)
        return tables

    def start(self, slot: int, token_ids: Sequence[int]) -> int:
        """Return the first position that must be computed before a token can be drafted behind `token_ids`, which are
        all known tokens of the slot."""
        num_valid = self._num_valid[slot]
        for token_id in self._guessed[slot]:
            if num_valid >= len(token_ids) or token_ids[num_valid] != token_id:
                break
            num_valid += 1
        self._guessed[slot].clear()
        self.advance(slot, num_valid)
        return min(num_valid, len(token_ids) - 1)

    @property
    def max_len(self) -> int:
        """Return the number of positions of the longest request."""
        return self.tables.shape[1] * self._block_size

    def num_valid(self, slot: int) -> int:
        """Return how many leading positions of a slot are computed."""
        return self._num_valid[slot]

    def advance(self, slot: int, end: int) -> None:
        """Record that the positions before `end`, of known tokens, are computed."""
        start, size = self._num_valid[slot], self._block_size
        if end <= start:
            return
        for index in range(start // size, -(-end // size)):
            self._filled[self.tables[slot, index]] = min(size, end - index * size)
        self._num_valid[slot] = end

    def guess(self, slot: int, token_id: int) -> None:
        """Record that the next position is computed from a draft token."""
        self._guessed[slot].append(token_id)

    def _add(self, slot: int, start: int, block_ids: Sequence[int]) -> None:
        """Append blocks to a slot's table. Those from position `start` on have no content yet."""
        first = self._num_blocks[slot]
        end = self._num_blocks[slot] = first + len(block_ids)
        self.tables[slot, first:end] = block_ids
        num_full = -(-start // self._block_size)
        self._filled[self.tables[slot, max(first, num_full) : end]] = 0
        if first == 0:
            self._num_valid[slot] = self._num_leading(slot, start)

    def _num_leading(self, slot: int, end: int) -> int:
        """Return how many of the first `end` positions of a slot are computed without a gap."""
        size = self._block_size
        for index in range(-(-end // size)):
            if (filled := int(self._filled[self.tables[slot, index]])) < size:
                return min(index * size + filled, end)
        return end
