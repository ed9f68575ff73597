"""A model of random opinions that obeys masks, with the real sampler: what it says depends on the token before and its
position alone, so its answers are the same in every schedule."""

from __future__ import annotations

import numpy as np

from engine.core.cache_groups import FULL_ATTENTION
from engine.core.types import Batch, StepOutput
from engine.executors.slots import Slots
from engine.executors.step import StepWhenAsked
from engine.ops import reference

NUM_SLOTS, MAX_BLOCKS = 64, 64


class RandomModel:
    block_bytes = 1
    runs_ahead = False
    max_prompt_logits = 0
    takes_spans = False
    vision = expert_usage = draft_counts = None
    max_drafts = 0
    thread = None
    cache_groups = FULL_ATTENTION

    def __init__(self, vocab_size: int, likely_ids: tuple[int, ...] = (), block_size: int = 16):
        """Make `likely_ids` more likely than others: without this, JSON would hardly ever end."""
        self.block_size = block_size
        self.num_steps = self.num_masked = 0
        self._vocab_size = vocab_size
        self._bonus = np.zeros(vocab_size, np.float32)
        self._bonus[list(likely_ids)] = 5
        self._slots = Slots(NUM_SLOTS, MAX_BLOCKS, block_size, vocab_size)

    def free_bytes(self) -> int:
        return 1 << 20

    def allocate(self, num_blocks: int) -> None: ...

    def warm_up(self) -> None: ...

    def launch(self, batch: Batch) -> StepWhenAsked:
        return StepWhenAsked(lambda mask: self._compute(batch, mask))

    def close(self) -> None: ...

    def _compute(self, batch: Batch, mask: np.ndarray | None) -> StepOutput:
        assert batch.has_mask == (mask is not None)
        self.num_steps += 1
        self.num_masked += mask is not None
        self._slots.place(batch)
        logits = [
            self._logits(row.token_ids[index], row.start + index)
            for row in batch.rows
            for index in range(len(row.token_ids) - row.num_sampled, len(row.token_ids))
        ]
        return self._slots.sample(batch, np.array(logits, np.float32), mask, reference.sample)

    def _logits(self, token_id: int, position: int) -> np.ndarray:
        return np.random.default_rng([token_id, position]).normal(0, 2, self._vocab_size) + self._bonus
