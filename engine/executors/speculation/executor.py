"""Speculative decoding for any executor. It handles tokens and slots, and is independent of blocks and tensors. The
scheduler has reserved the blocks for the drafts."""

from __future__ import annotations

from engine.core.executor import Executor, Step
from engine.core.types import PENDING, Batch
from engine.executors.block_access import BlockAccess
from engine.executors.speculation.drafted_steps import DraftedSteps
from engine.executors.speculation.lookup import LookupProposer
from engine.executors.speculation.plain_steps import PlainSteps
from engine.executors.speculation.policy import DraftPolicy
from engine.executors.speculation.proposer import Proposer
from engine.executors.speculation.state import SpeculationState
from engine.executors.step import StepInThread
from engine.settings.config import Config


def with_speculation(
    executor: Executor, config: Config, policy: DraftPolicy | None = None, proposer: Proposer | None = None
) -> Executor:
    """Return `executor`, with drafts if SPECULATE_METHOD names a method. Without a policy all drafts are verified.
    `proposer` makes the drafts of the methods `draft`, `mtp` and `eagle3`."""
    if config.speculate_method == "none":
        return executor
    proposer = proposer or LookupProposer.of(config)
    return SpeculativeExecutor(executor, config.speculate_max_draft_token_num, proposer, policy)


class SpeculativeExecutor:
    """Executor that adds draft tokens to the rows of another executor. Owns the proposer of the drafts.

    The scheduler can schedule a step while the one before runs, and need not know how many drafts are accepted. The
    other executor, with all its ranks, receives batches in which every token is known. While the policy pauses
    drafting, steps are passed on as if there were no drafts.
    """

    def __init__(self, executor: Executor, max_drafts: int, proposer: Proposer, policy: DraftPolicy | None = None):
        """Wrap `executor`. A row gets at most `max_drafts` drafts. The policy chooses how many drafts are verified;
        without one, all of them are."""
        self._max_drafts, self._executor, self._policy, self._proposer = max_drafts, executor, policy, proposer
        self.block_size, self.block_bytes = executor.block_size, executor.block_bytes + proposer.block_bytes
        self.cache_groups, self.takes_spans = executor.cache_groups, executor.takes_spans
        self.vision = getattr(executor, "vision", None)
        self.expert_usage = getattr(executor, "expert_usage", None)
        self.max_prompt_logits = executor.max_prompt_logits
        self.thread = executor.thread
        self._state = SpeculationState(executor, proposer, policy)
        self._drafted = DraftedSteps(self._state)
        self._plain = PlainSteps(self._state, self._drafted)
        self.draft_counts = self._drafted.counts

    @property
    def _is_paused(self) -> bool:
        can_pause = self._state.computes or self._state.runs_ahead
        return can_pause and self._policy is not None and self._policy.is_paused

    @property
    def max_drafts(self) -> int:
        return 0 if self._is_paused else self._max_drafts

    @property
    def runs_ahead(self) -> bool:
        return self._state.runs_ahead or not self._is_paused

    def free_bytes(self) -> int:
        return self._executor.free_bytes()

    def allocate(self, num_blocks: int) -> None:
        self._executor.allocate(num_blocks)
        self._state.thread.submit(self._proposer.allocate, num_blocks).result()  # where it will run

    def warm_up(self) -> None:
        self._executor.warm_up()

    def load_adapter(self, adapter: tuple[str, ...]) -> None:
        self._state.thread.submit(self._executor.load_adapter, adapter).result()  # after the steps that were launched

    def drop_adapter(self, adapter_id: str) -> None:
        dropped = self._state.thread.submit(self._executor.drop_adapter, adapter_id)
        if self._state.runs_ahead:
            dropped.result()  # steps may be launched in this thread

    def launch(self, batch: Batch) -> Step:
        state, is_plain = self._state, not batch.max_drafts
        if is_plain and state.computes and not any(row.token_ids[0] == PENDING for row in batch.rows):
            return StepInThread(state.thread, batch, self._plain.compute)
        if is_plain and state.runs_ahead and self._proposer.allows_plain_step(batch):
            return self._plain.launch(batch)
        self._plain.wait()
        return self._drafted.launch(batch)

    def blocks(self) -> BlockAccess:
        """Return the access to the blocks. Those of a draft model are not part of it."""
        access: BlockAccess = self._executor.blocks()  # type: ignore[attr-defined]
        return access

    def close(self) -> None:
        self._state.thread.shutdown(cancel_futures=True)
        self._drafted.deliver()
        self._executor.close()
