"""Steps with drafts: propose, verify, accept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from msgspec.structs import replace

from engine.core.draft_counts import DraftCounts
from engine.core.types import PENDING, Batch, StepOutput
from engine.executors.speculation.requests import Verification, append_tokens
from engine.executors.speculation.state import SpeculationState
from engine.executors.speculation.verified_rows import RunningStep

PATIENCE_SHARE = 0.5  # of the time of the last step, that this one waits for the batch of the next one
Drafts = dict[int, Sequence[int]]  # by slot


@dataclass
class DraftedStep:
    """A step with drafts. It may still wait for the steps before it."""

    output: Future[StepOutput] = field(default_factory=Future)
    drafted: Future[Mapping[int, Sequence[int]]] = field(default_factory=Future)
    masked: Future[Any] = field(default_factory=Future)
    follows: bool = False  # immediately another one, on an executor that runs ahead

    def drafts(self) -> Mapping[int, Sequence[int]]:
        return self.drafted.result()

    def mask(self, bits: Any) -> None:
        self.masked.set_result(bits)

    def result(self) -> StepOutput:
        return self.output.result()


class DraftedSteps:
    """Steps with drafts, which run one after another in a thread. When the tokens of a step are known there, the thread
    fills in the PENDING tokens of the next step, adds drafts to its rows, and launches it on the target executor. On a
    GPU the drafts of a step are launched while the step before runs, if the proposer can do that."""

    def __init__(self, state: SpeculationState):
        self._state = state
        self.counts = DraftCounts(state.proposer.method)
        self._last: DraftedStep | None = None  # launched in the thread, unless a plain step came behind it
        # A step with its output and the function that learns from it, until the next one is launched
        self._kept_back: tuple[DraftedStep, StepOutput, Callable[[], None]] | None = None
        self._coming = BatchQueue()
        self._patience_s = 0.0  # how long a step may wait for the next one, to launch its drafts

    def launch(self, batch: Batch) -> DraftedStep:
        last = self._last
        step = DraftedStep(follows=self._state.runs_ahead and last is not None and not last.output.done())
        self._last = step  # before it can end
        self._coming.put(batch)
        submitted = self._state.thread.submit(self._run, batch, step)
        submitted.add_done_callback(lambda run: run.cancelled() and step.output.cancel())
        return step

    def wait_for_last(self) -> bool:
        """Wait for the last step. Return whether there was one since the last call."""
        last = self._last
        if last:
            last.output.exception()  # waits
            self._last = None
        return last is not None

    def deliver(self) -> None:
        """Learn from a step whose result is kept back, and set the result."""
        if self._kept_back:
            (step, output, learn), self._kept_back = self._kept_back, None
            try:
                learn()
            finally:
                step.output.set_result(output)

    def _run(self, batch: Batch, step: DraftedStep) -> None:
        """Compute a step and set its results. On a device that runs ahead, they are kept back if another step waits
        for this thread, until that one is launched: what the engine does with them would delay it."""
        self._coming.take()
        try:
            self._kept_back = step, *self._compute(batch, step)
        except BaseException as error:
            self._state.error = error
            self.deliver()
            if not step.drafted.done():  # otherwise `drafts` would wait forever
                step.drafted.set_exception(error)
            step.output.set_exception(error)
        if self._last is step or not self._state.runs_ahead:
            self.deliver()

    def _compute(self, batch: Batch, step: DraftedStep) -> tuple[StepOutput, Callable[[], None]]:
        """Return the output of a step, and the function that learns from it."""
        state = self._state
        state.place(batch)
        began = time.perf_counter()
        filled, drafts = self._propose(batch)
        launched = time.perf_counter()
        output, states = self._verify(filled, drafts, step)
        self._patience_s = PATIENCE_SHARE * (time.perf_counter() - launched)
        gain, step_s = None, 0.0
        if state.policy:
            now, invested_s = time.perf_counter(), state.proposer.invested_s
            step_s, draft_s = now - launched, launched - began - invested_s
            if step.follows:  # with what the host has done since the step before
                step_s += began - state.ended_s
            state.ended_s = now
            # On a device that runs ahead, drafts are usually computed in the time of the step, but not if the draft
            # model has to read many tokens before.
            is_usual = not (state.runs_ahead and invested_s)
            gain = partial(state.policy.learn, filled.rows, output, (step_s, draft_s), is_usual=is_usual)
        verifications = append_tokens(state.requests, filled.rows, output, drafts)
        state.proposer.add_hidden_states(filled.rows, state.requests, state.policy, states)
        output = output._replace(num_drafts=sum(map(len, drafts.values())))
        return output, partial(self._learn, verifications, gain, step_s)

    def _propose(self, batch: Batch) -> tuple[Batch, Drafts]:
        """Return the batch with all its tokens, and the drafts that were added to it."""
        state = self._state
        rows = [
            state.requests[row.slot].fill_in(row) if row.max_drafts or row.token_ids[0] == PENDING else row
            for row in batch.rows
        ]
        added: Drafts = {}
        for index, drafts in state.proposer.propose(rows, state.requests, batch.max_drafts, state.policy):
            row = rows[index]
            added[row.slot] = drafts
            rows[index] = replace(row, token_ids=[*row.token_ids, *drafts], num_sampled=row.num_sampled + len(drafts))
        return batch._replace(rows=[replace(row, max_drafts=0) for row in rows], max_drafts=0), added

    def _verify(self, filled: Batch, drafts: Drafts, step: DraftedStep) -> tuple[StepOutput, Any]:
        """Return the output of the target executor, and the hidden states of the step. Placeholders of drafts are
        replaced by their tokens."""
        state = self._state
        if state.computes:
            step.drafted.set_result(drafts)
            wait_for_mask = step.masked.result if filled.has_mask else lambda: None
            output: StepOutput = state.executor.compute(filled, wait_for_mask)  # type: ignore[attr-defined]
            return output, state.proposer.hidden_states(filled.rows)
        running = state.executor.launch(filled)
        self.deliver()
        states = state.proposer.hidden_states(filled.rows) if state.runs_ahead else None
        for index, tokens in state.proposer.resolve():
            row_tokens: Any = filled.rows[index].token_ids  # a list that `_propose` has made
            row_tokens[-len(tokens) :] = drafts[filled.rows[index].slot] = tokens
        step.drafted.set_result(drafts)
        if filled.has_mask:
            running.mask(step.masked.result())
        elif state.runs_ahead:
            self._propose_ahead(RunningStep(filled.rows, states))
        output = running.result()
        return output, states if state.runs_ahead else state.proposer.hidden_states(filled.rows)

    def _propose_ahead(self, running: RunningStep) -> None:
        """Launch the drafts of the next step behind a running one. The scheduler has usually scheduled it by now, or
        does so soon."""
        if any(len(row.token_ids) != row.num_sampled for row in running.rows):
            return
        if batch := self._coming.peek(self._patience_s):
            state = self._state
            state.is_placed = state.proposer.propose_ahead(running, batch, state.requests, state.policy)

    def _learn(self, verifications: Sequence[Verification], gain: Callable[[], float] | None, step_s: float) -> None:
        """Count the drafts of a step, and let the policy and the proposer learn from it. `gain` returns the time that
        the drafts have saved."""
        for each in verifications:
            self.counts.count(each.num_drafts, each.num_accepted)
        if self._state.policy and gain:
            self._state.proposer.learn(verifications, self._state.policy, gain(), step_s)


class BatchQueue:
    """Batches on the way to a thread, which may look at the next one before it takes it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Batch] = SimpleQueue()
        self._next: Batch | None = None

    def put(self, batch: Batch) -> None:
        self._queue.put(batch)

    def peek(self, timeout_s: float) -> Batch | None:
        """Return the next batch, which stays in the queue. Return None if none comes in time."""
        if self._next is None:
            with contextlib.suppress(Empty):
                self._next = self._queue.get(timeout=timeout_s)
        return self._next

    def take(self) -> None:
        """Take the next batch, which is there."""
        if self._next is None:
            self._queue.get(block=False)
        self._next = None
