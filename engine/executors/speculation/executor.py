"""Speculative decoding for any executor: drafts tokens and passes them to the executor that verifies them.

It handles tokens and slots, and is independent of blocks and tensors. The scheduler has reserved the blocks for the
drafts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from msgspec.structs import replace

from engine.core.draft_counts import DraftCounts
from engine.core.types import PENDING, Batch, Executor, Row, Step, StepOutput
from engine.executors.speculation.policy import DraftPolicy
from engine.executors.speculation.requests import DraftedSlot, Drafts, Judged
from engine.executors.speculation.lookup import LookupDrafts
from engine.executors.rank_blocks import BlockAccess
from engine.executors.step import ComingBatches, DraftingStep, Mask, PassedStep, StepInThread
from engine.executors.speculation.verified_rows import RunningStep
from engine.settings.config import Config

PATIENCE_SHARE = 0.5  # of the time of the last step, that this one waits for the batch of the next one
NUM_READING = 3  # steps in whose time the source reads: the one that has ended, the one that runs, and the next


class DraftSource(Protocol):
    """Source of draft tokens for the rows of a step: earlier tokens, or a draft model."""

    method: str  # name of SPECULATE_METHOD
    block_bytes: int  # that it needs in addition for each block of the KV cache
    invested_s: float  # the part of the last `drafts` whose time is not a cost of this step

    def allocate(self, num_blocks: int) -> None:
        """Allocate its caches for a pool of `num_blocks` blocks."""
        ...

    def begin(self, batch: Batch, slots: Mapping[int, DraftedSlot]) -> None:
        """Note the new requests and blocks of a step. `slots` are those before it."""
        ...

    def drafts(
        self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], max_drafts: int, policy: DraftPolicy | None
    ) -> Drafts:
        """Return the drafts of the rows, at most `max_drafts` together. The policy chooses how many; without one, there
        are as many as possible. On a device that runs ahead, ids may stand for tokens that are still computed."""
        ...

    def begin_ahead(
        self, running: RunningStep, batch: Batch, slots: Mapping[int, DraftedSlot], policy: DraftPolicy | None
    ) -> bool:
        """Launch the drafts for the next step, whose `batch` continues the `running` one, if the device can take the
        tokens of the latter. Return whether it has, and has also noted the batch as in `begin`. The next call of
        `drafts` is the one for that batch."""
        ...

    def finish(self, slots: Mapping[int, DraftedSlot]) -> Drafts:
        """Return the tokens of the last `drafts` if it has returned ids that stand for them."""
        ...

    def read(
        self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], policy: DraftPolicy | None, noted: Any
    ) -> None:
        """Read what a step has computed beside its tokens, which are in `slots`. `noted`: the result of `note`."""
        ...

    def may_pass(self, batch: Batch) -> bool:
        """Return whether a step may run while the next one is launched, if `keep` is called for it in place of `note`
        and `read`."""
        ...

    def note(self, rows: Sequence[Row]) -> Any:
        """Note what a step that was launched computes beside its tokens, before the next one overwrites it."""
        ...

    def keep(self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], policy: DraftPolicy | None) -> bool:
        """Note that a step was launched ahead, whose tokens are now in `slots`. Return whether the device now reads
        what such steps have computed beside their tokens, which takes time from the next steps."""
        ...

    def learn(self, judged: Sequence[Judged], policy: DraftPolicy, gain_s: float, step_s: float) -> None:
        """Learn which drafts of a step were right, how much time they have saved, and how long it took."""
        ...


def with_drafts(
    executor: Executor, config: Config, policy: DraftPolicy | None = None, source: DraftSource | None = None
) -> Executor:
    """Return `executor`, with drafts if SPECULATE_METHOD names a method. Without a policy all drafts are verified.
    `source` makes the drafts of the methods `draft`, `mtp` and `eagle3`."""
    if config.speculate_method == "none":
        return executor
    source = source or LookupDrafts.of(config)
    return DraftingExecutor(executor, config.speculate_max_draft_token_num, source, policy)


class DraftingExecutor:
    """Executor that adds draft tokens to the rows of another executor. Owns the source of the drafts.

    Steps run one after another in a thread. When the tokens of a step are known there, the thread fills in the PENDING
    tokens of the next step, adds drafts to its rows, and launches it on the other executor. So the scheduler can
    schedule a step while the one before runs, and need not know how many drafts are accepted. The other executor, with
    all its ranks, receives batches in which every token is known. On a GPU the drafts of a step are launched while the
    step before runs, if the source can do that.

    While the policy rests, steps are passed on as if there were no drafts: in the thread of an executor that computes
    in one, and otherwise before the tokens of the step before are known.
    """

    def __init__(
        self,
        executor: Executor,
        max_drafts: int,
        source: DraftSource,
        policy: DraftPolicy | None = None,
    ):
        """Wrap `executor`. A row gets at most `max_drafts` drafts. The policy chooses how many drafts are verified;
        without one, all of them are."""
        self._max_drafts = max_drafts
        self.block_size, self.block_bytes = executor.block_size, executor.block_bytes + source.block_bytes
        self.cache_groups, self.takes_spans = executor.cache_groups, executor.takes_spans
        self.vision = getattr(executor, "vision", None)
        self.expert_usage = getattr(executor, "expert_usage", None)
        self.max_prompt_logits = executor.max_prompt_logits
        self._executor = executor
        self._source, self._policy = source, policy
        self.draft_counts = DraftCounts(source.method)
        self._slots: dict[int, DraftedSlot] = {}
        self._error: BaseException | None = None  # the error of the step that failed
        # If the other executor computes in a thread, drafts are made there as well, beside the same threads of the ops.
        self.thread = executor.thread
        self._computes = executor.thread is not None
        self._is_ahead = not self._computes and executor.runs_ahead
        if policy and self._is_ahead:
            policy.is_ahead = True
        self._passed: deque[PassedStep] = deque()  # launched ahead, the last ones; their tokens may be unknown
        self._num_reading = 0  # the next ones of them, in whose time the source reads
        self._last: DraftingStep | None = None  # launched in the thread, unless a passed step came behind it
        self._kept_back: tuple[DraftingStep, StepOutput] | None = None  # result of a step, until the next is launched
        self._ended_s = 0.0  # when the last step has ended
        self._coming = ComingBatches()  # for the thread
        self._is_begun = False  # the next one, whose drafts were launched ahead
        self._patience_s = 0.0  # how long a step may wait for the next one, to launch its drafts
        self._thread = executor.thread or ThreadPoolExecutor(1, "drafts")

    @property
    def _rests(self) -> bool:
        return (self._computes or self._is_ahead) and self._policy is not None and self._policy.rests

    @property
    def max_drafts(self) -> int:
        return 0 if self._rests else self._max_drafts

    @property
    def runs_ahead(self) -> bool:
        return self._is_ahead or not self._rests

    def free_bytes(self) -> int:
        return self._executor.free_bytes()

    def allocate(self, num_blocks: int) -> None:
        self._executor.allocate(num_blocks)
        self._thread.submit(self._source.allocate, num_blocks).result()  # where it will run

    def warm_up(self) -> None:
        self._executor.warm_up()

    def load_adapter(self, adapter: tuple[str, ...]) -> None:
        self._thread.submit(self._executor.load_adapter, adapter).result()  # after the steps that were launched

    def drop_adapter(self, adapter_id: str) -> None:
        dropped = self._thread.submit(self._executor.drop_adapter, adapter_id)
        if self._is_ahead:
            dropped.result()  # steps may be launched in this thread

    def launch(self, batch: Batch) -> Step:
        if self._computes and not batch.max_drafts and not any(row.token_ids[0] == PENDING for row in batch.rows):
            return StepInThread(self._thread, batch, self._pass_on)
        if self._is_ahead and not batch.max_drafts and self._source.may_pass(batch):
            return self._pass_ahead(batch)
        while self._passed:
            self._passed.popleft().result()
        step = DraftingStep(follows=self._is_ahead and self._last is not None and not self._last.output.done())
        self._last = step  # before it can end
        self._coming.put(batch)
        submitted = self._thread.submit(self._run, batch, step)
        submitted.add_done_callback(lambda run: run.cancelled() and step.output.cancel())
        return step

    def blocks(self) -> BlockAccess:
        """Return the access to the blocks. Those of a draft model are not part of it."""
        access: BlockAccess = self._executor.blocks()  # type: ignore[attr-defined]
        return access

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._deliver()
        self._executor.close()

    def _run(self, batch: Batch, step: DraftingStep) -> None:
        """Compute a step and set its results. On a device that runs ahead, they are kept back if another step waits
        for this thread, until that one is launched: what the engine does with them would delay it."""
        self._coming.take()
        try:
            if self._error:  # An earlier step has failed: the state that this one starts from is undefined.
                raise self._error
            self._kept_back = step, self._compute(batch, step)
        except BaseException as error:
            self._error = error
            self._deliver()
            if not step.drafted.done():  # otherwise `drafts` would wait forever
                step.drafted.set_exception(error)
            step.output.set_exception(error)
        if self._last is step or not self._is_ahead:
            self._deliver()

    def _deliver(self) -> None:
        """Learn from a step whose result is kept back, and set the result."""
        if self._kept_back:
            (step, output), self._kept_back = self._kept_back, None
            try:
                step.learn()
            finally:
                step.output.set_result(output)

    def _pass_on(self, batch: Batch, wait_for_mask: Callable[[], Mask]) -> StepOutput:
        """Compute a step without drafts and note its tokens."""
        if self._error:
            raise self._error
        began = time.perf_counter()
        try:
            self._begin(batch)
            output: StepOutput = self._executor.compute(batch, wait_for_mask)  # type: ignore[attr-defined]
            self._append(batch.rows, output)
            self._source.read(batch.rows, self._slots, self._policy, self._source.note(batch.rows))
        except BaseException as error:
            self._error = error
            raise
        if self._policy:
            self._policy.rest(time.perf_counter() - began)
        return output

    def _pass_ahead(self, batch: Batch) -> Step:
        """Launch a step without drafts. The executor knows its PENDING tokens, unless the step before had drafts, for
        which it waits."""
        began = time.perf_counter()
        if self._last:
            self._last.output.exception()  # waits
            self._last = None
            if self._policy:
                self._policy.begin_rest()
        if self._error:
            raise self._error
        self._begin(batch)
        while self._passed and self._passed[0].is_finished:
            self._passed.popleft()
        if not self._passed:
            batch = batch._replace(rows=[self._slots[row.slot].fill_in(row) for row in batch.rows])
        rows, step = batch.rows, self._executor.launch(batch)
        slots = {slot: self._slots[slot] for row in rows for slot in (row.slot, *row.forks)}
        passed = PassedStep(step, lambda output: self._finish(rows, slots, (output, began)))
        self._passed.append(passed)
        return passed

    def _finish(self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], result: tuple[StepOutput, float]) -> None:
        """Note the tokens of a step that was launched ahead. `slots` are those at that time: since then other requests
        may have taken some of them. `result` has the output, and when the step was launched."""
        output, began = result
        self._append(rows, output, slots=slots)
        if self._source.keep(rows, slots, self._policy):
            self._num_reading = NUM_READING
        now = time.perf_counter()
        if self._policy:
            seconds = now - max(began, self._ended_s)
            num_unable = sum(len(slots[row.slot].token_ids) < slots[row.slot].retry_at for row in rows)
            self._policy.rest(seconds, rows, is_usual=not self._num_reading, num_unable=num_unable)
            self._source.learn((), self._policy, 0.0, seconds)
        self._num_reading = max(self._num_reading - 1, 0)
        self._ended_s = now

    def _begin(self, batch: Batch) -> None:
        """Note the new requests and blocks of a step."""
        if self._is_begun:
            self._is_begun = False
            return
        self._source.begin(batch, self._slots)
        for slot, token_ids, prompt_len, sampling, *_ in batch.arrivals:
            max_len = prompt_len + max(sampling.max_new_tokens - 1, 0)
            by_tokens = bool(sampling.has_penalty or sampling.bad_words or sampling.logit_bias)
            self._slots[slot] = DraftedSlot(list(token_ids), prompt_len, max_len, by_tokens)

    def _compute(self, batch: Batch, step: DraftingStep) -> StepOutput:
        self._begin(batch)
        began = time.perf_counter()
        filled, drafts = self._fill_in(batch)
        launched = time.perf_counter()
        output, noted = self._output(filled, drafts, step)
        self._patience_s = PATIENCE_SHARE * (time.perf_counter() - launched)
        gain, step_s = None, 0.0
        if self._policy:
            now = time.perf_counter()
            step_s, draft_s = now - launched, launched - began - self._source.invested_s
            if step.follows:  # with what the host has done since the step before
                step_s += began - self._ended_s
            self._ended_s = now
            # On a device that runs ahead, drafts are usually computed in the time of the step, but not if the draft
            # model has to read many tokens before.
            is_usual = not (self._is_ahead and self._source.invested_s)
            gain = partial(self._policy.learn, filled.rows, output, (step_s, draft_s), is_usual=is_usual)
        step.learn = partial(self._learn, self._append(filled.rows, output, drafts), gain, step_s)
        self._source.read(filled.rows, self._slots, self._policy, noted)
        return output._replace(num_drafts=sum(map(len, drafts.values())))

    def _learn(self, judged: Sequence[Judged], gain: Callable[[], float] | None, step_s: float) -> None:
        """Count the drafts of a step, and let the policy and the source learn from it. `gain` returns the time that the
        drafts have saved."""
        for _, _, num_drafts, num_right in judged:
            self.draft_counts.count(num_drafts, num_right)
        if self._policy and gain:
            self._source.learn(judged, self._policy, gain(), step_s)

    def _output(self, filled: Batch, drafts: dict[int, Sequence[int]], step: DraftingStep) -> tuple[StepOutput, Any]:
        """Return the output of the other executor, and what the source has noted of the step. Drafts that are still
        computed are replaced by their tokens."""
        if self._computes:
            step.drafted.set_result(drafts)
            wait_for_mask = step.masked.result if filled.has_mask else lambda: None
            output: StepOutput = self._executor.compute(filled, wait_for_mask)  # type: ignore[attr-defined]
            return output, self._source.note(filled.rows)
        running = self._executor.launch(filled)
        self._deliver()
        noted = self._source.note(filled.rows) if self._is_ahead else None
        for index, tokens in self._source.finish(self._slots):
            row_tokens: Any = filled.rows[index].token_ids  # a list that `_fill_in` has made
            row_tokens[-len(tokens) :] = drafts[filled.rows[index].slot] = tokens
        step.drafted.set_result(drafts)
        if filled.has_mask:
            running.mask(step.masked.result())
        elif self._is_ahead:
            self._begin_ahead(filled, noted)
        output = running.result()
        return output, noted if self._is_ahead else self._source.note(filled.rows)

    def _begin_ahead(self, filled: Batch, noted: Any) -> None:
        """Launch the drafts of the next step behind a running one. The scheduler has usually scheduled it by now, or
        does so soon."""
        if any(len(row.token_ids) != row.num_sampled for row in filled.rows):
            return
        if batch := self._coming.next(self._patience_s):
            running = RunningStep(filled.rows, noted)
            self._is_begun = self._source.begin_ahead(running, batch, self._slots, self._policy)

    def _fill_in(self, batch: Batch) -> tuple[Batch, dict[int, Sequence[int]]]:
        """Return the batch with all its tokens, and the drafts that were added to it, by slot."""
        rows = [
            self._slots[row.slot].fill_in(row) if row.max_drafts or row.token_ids[0] == PENDING else row
            for row in batch.rows
        ]
        offers = self._source.drafts(rows, self._slots, batch.max_drafts, self._policy)
        added = {}
        for index, drafts in offers:
            row = rows[index]
            added[row.slot] = drafts
            rows[index] = replace(row, token_ids=[*row.token_ids, *drafts], num_sampled=row.num_sampled + len(drafts))
        return batch._replace(rows=[replace(row, max_drafts=0) for row in rows], max_drafts=0), added

    def _append(
        self,
        rows: Sequence[Row],
        output: StepOutput,
        drafts: Mapping[int, Sequence[int]] = MappingProxyType({}),
        slots: Mapping[int, DraftedSlot] | None = None,
    ) -> list[Judged]:
        """Add the tokens of a step to those of its slots. Return which drafts were right."""
        sampled, slots = iter(output.token_ids), self._slots if slots is None else slots
        judged: list[Judged] = []
        for row in rows:
            if row.num_sampled:
                for slot in (row.slot, *row.forks) if row.forks else (row.slot,):
                    token_ids = next(sampled)
                    slots[slot].token_ids += token_ids
                    if drafts and slot in drafts:
                        judged.append((slots[slot], slots[slot].level, len(drafts[slot]), len(token_ids) - 1))
        return judged
