"""Steps that are computed without drafts while the policy pauses drafting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.core.executor import Step
from engine.core.types import Batch, Row, StepOutput
from engine.executors.speculation.drafted_steps import DraftedSteps
from engine.executors.speculation.requests import DraftedRequest, append_tokens
from engine.executors.speculation.state import SpeculationState
from engine.executors.step import Mask

NUM_READING = 3  # steps in whose time the proposer reads: the one that has ended, the one that runs, and the next


class PlainStep:
    """A step without drafts, which was launched on the target executor. `finish` is called with its output."""

    def __init__(self, step: Step, finish: Callable[[StepOutput], None]):
        self._step, self._finish = step, finish
        self._output: StepOutput | None = None

    def drafts(self) -> Mapping[int, Sequence[int]]:
        return {}

    def mask(self, bits: Any) -> None:
        self._step.mask(bits)

    def result(self) -> StepOutput:
        if self._output is None:
            self._output = self._step.result()
            self._finish(self._output)
        return self._output

    @property
    def is_finished(self) -> bool:
        return self._output is not None


class PlainSteps:
    """Steps without drafts. They are computed as if there was no speculation: in the thread of an executor that
    computes in one, and otherwise launched before the tokens of the step before are known."""

    def __init__(self, state: SpeculationState, drafted: DraftedSteps):
        self._state, self._drafted = state, drafted
        self._launched: deque[PlainStep] = deque()  # the last ones; their tokens may be unknown
        self._num_reading = 0  # the next ones of them, in whose time the proposer reads hidden states

    def compute(self, batch: Batch, wait_for_mask: Callable[[], Mask]) -> StepOutput:
        """Compute a step, in the thread of the executor."""
        state = self._state
        began = time.perf_counter()
        try:
            state.place(batch)
            output: StepOutput = state.executor.compute(batch, wait_for_mask)  # type: ignore[attr-defined]
            append_tokens(state.requests, batch.rows, output)
            states = state.proposer.hidden_states(batch.rows)
            state.proposer.add_hidden_states(batch.rows, state.requests, state.policy, states)
        except BaseException as error:
            state.error = error
            raise
        if state.policy:
            state.policy.observe_pause(time.perf_counter() - began)
        return output

    def launch(self, batch: Batch) -> Step:
        """Launch a step on an executor that runs ahead. It knows its PENDING tokens, unless the step before had drafts,
        for which this one waits."""
        state, began = self._state, time.perf_counter()
        if self._drafted.wait_for_last() and state.policy:
            state.policy.begin_pause()
        state.place(batch)
        while self._launched and self._launched[0].is_finished:
            self._launched.popleft()
        if not self._launched:
            batch = batch._replace(rows=[state.requests[row.slot].fill_in(row) for row in batch.rows])
        rows, step = batch.rows, state.executor.launch(batch)
        # Until the step ends, other requests may take some of the slots.
        requests = {slot: state.requests[slot] for row in rows for slot in (row.slot, *row.forks)}
        self._launched.append(PlainStep(step, lambda output: self._finish(rows, requests, output, began)))
        return self._launched[-1]

    def wait(self) -> None:
        """Wait for all launched steps."""
        while self._launched:
            self._launched.popleft().result()

    def _finish(
        self, rows: Sequence[Row], requests: Mapping[int, DraftedRequest], output: StepOutput, began: float
    ) -> None:
        """Add the tokens of a launched step to its requests, and let the policy learn its time."""
        state = self._state
        append_tokens(requests, rows, output)
        if state.proposer.after_plain_step(rows, requests, state.policy):
            self._num_reading = NUM_READING
        now = time.perf_counter()
        if state.policy:
            seconds = now - max(began, state.ended_s)
            num_unable = sum(requests[row.slot].is_deferred for row in rows)
            state.policy.observe_pause(seconds, rows, is_usual=not self._num_reading, num_unable=num_unable)
            state.proposer.learn((), state.policy, 0.0, seconds)
        self._num_reading = max(self._num_reading - 1, 0)
        state.ended_s = now
