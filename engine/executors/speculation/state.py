"""State of speculative decoding that steps with and without drafts share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from engine.core.executor import Executor
from engine.core.types import Batch
from engine.executors.speculation.policy import DraftPolicy
from engine.executors.speculation.proposer import Proposer
from engine.executors.speculation.requests import DraftedRequest


class SpeculationState:
    """The target executor, which verifies the drafts, the proposer and the policy; the requests in the slots, and the
    error of the step that has failed."""

    def __init__(self, executor: Executor, proposer: Proposer, policy: DraftPolicy | None):
        self.executor, self.proposer, self.policy = executor, proposer, policy
        self.requests: dict[int, DraftedRequest] = {}  # by slot
        # If the target executor computes in a thread, drafts are made there as well, with the same threads of the ops.
        self.computes = executor.thread is not None
        self.thread = executor.thread or ThreadPoolExecutor(1, "drafts")
        self.runs_ahead = runs_ahead(executor)
        self.ended_s = 0.0  # when the last step has ended
        self.error: BaseException | None = None
        self.is_placed = False  # the next batch, whose drafts were launched ahead

    def place(self, batch: Batch) -> None:
        """Take over the new requests and blocks of a step. Raises the error of an earlier step: the state that this one
        would start from is undefined."""
        if self.error:
            raise self.error
        if self.is_placed:
            self.is_placed = False
            return
        self.proposer.place(batch, self.requests)
        for arrival in batch.arrivals:
            self.requests[arrival.slot] = DraftedRequest.of(arrival)


def runs_ahead(executor: Executor) -> bool:
    """Return whether a step is launched on the executor before the tokens of the one before are known, in the thread of
    the caller."""
    return executor.thread is None and executor.runs_ahead
