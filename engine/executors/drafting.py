"""Speculative decoding for any executor: drafts tokens and passes them to the executor that verifies them.

It handles tokens and slots, and is independent of blocks and tensors. The scheduler has reserved the blocks for the
drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

from engine.core.types import PENDING, Arrival, Batch, Executor, Row, StepOutput
from engine.executors.draft_policy import Acceptance, DraftPolicy
from engine.executors.ngram import NgramDrafter
from engine.executors.suffix import RecentAnswers, SuffixDrafter
from engine.settings.config import Config


class Drafter(Protocol):
    """Proposes the tokens that may follow those of one slot."""

    @property
    def level(self) -> int:
        """Return how sure it is of the last proposal, from 0. The policy counts how often each level is right."""
        ...

    def propose(self, token_ids: list[int], max_drafts: int) -> Sequence[int]:
        """Return at most `max_drafts` tokens that may follow `token_ids`, or none when no continuation is likely.

        `token_ids` are all tokens of the slot. The caller calls this only when all of them are known, and each call
        repeats the tokens of the call before and appends to them.
        """
        ...

    def end(self, token_ids: Sequence[int]) -> None:
        """Note that the request has left its slot. `token_ids` are all its known tokens."""
        ...


def with_drafts(executor: Executor, config: Config, policy: DraftPolicy | None = None) -> Executor:
    """Return `executor`, with drafts if SPECULATE_METHOD names a method. Without a policy all drafts are verified."""
    if config.speculate_method == "none":
        return executor
    max_drafts = config.speculate_max_draft_token_num
    if config.speculate_method == "suffix":
        answers = RecentAnswers()
        return DraftingExecutor(executor, max_drafts, lambda arrival: SuffixDrafter(arrival, answers), policy)
    return DraftingExecutor(executor, max_drafts, lambda arrival: NgramDrafter(config), policy)


@dataclass
class DraftedSlot:
    """The tokens of the request in a slot, and its last drafts."""

    token_ids: list[int]  # prompt, then the known tokens of the answer
    max_len: int  # positions that the request can occupy at most, see `Request.max_len`
    drafter: Drafter
    drafts: Sequence[int] = ()  # the last ones, whether or not a step has verified them
    drafted_at: int = 0  # number of tokens at that time
    level: int = 0  # of these drafts
    was_right: bool = True  # the first of them

    def fill_in(self, row: Row) -> Row:
        """Return the row with its PENDING token filled in. A request that has meanwhile reached its length limit
        computes its last position again, with the same token."""
        if row.token_ids[0] != PENDING:
            return row
        start = min(len(self.token_ids), self.max_len) - 1
        token_id = max(self.token_ids[start], 0)  # the token is NO_TOKEN if the request has failed
        return row._replace(start=start, token_ids=[token_id, *row.token_ids[1:]])

    def offer(self, row: Row, max_drafts: int) -> Sequence[int]:
        """Return at most `max_drafts` tokens that may follow those of the filled row."""
        max_drafts = min(row.max_drafts, max_drafts, self.max_len - 1 - row.start)
        if max_drafts <= 0:
            return ()
        self.drafts, self.drafted_at = self.drafter.propose(self.token_ids, max_drafts), len(self.token_ids)
        self.level = 2 * self.drafter.level + self.was_right
        return self.drafts

    def judge(self, acceptance: Acceptance) -> None:
        """Compare the last drafts with the tokens that have followed, which are known even if no step has verified
        the drafts."""
        known = self.token_ids[self.drafted_at : self.drafted_at + len(self.drafts)]
        if known and self.drafts:
            num_right = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, self.drafts, strict=False))
            )
            acceptance.record(self.level, num_right, len(known))
            self.was_right, self.drafts = num_right > 0, ()


@dataclass
class DraftingStep:
    """A step of a `DraftingExecutor`. It may still wait for the steps before it."""

    output: Future[StepOutput] = field(default_factory=Future)
    drafted: Future[Mapping[int, Sequence[int]]] = field(default_factory=Future)
    masked: Future[Any] = field(default_factory=Future)

    def drafts(self) -> Mapping[int, Sequence[int]]:
        return self.drafted.result()

    def mask(self, bits: Any) -> None:
        self.masked.set_result(bits)

    def result(self) -> StepOutput:
        return self.output.result()


class DraftingExecutor:
    """Executor that adds draft tokens to the rows of another executor. Owns a `Drafter` for each slot.

    Steps run one after another in a thread. When the tokens of a step are known there, the thread fills in the PENDING
    tokens of the next step, adds drafts to its rows, and launches it on the other executor. So the scheduler can
    schedule a step while the one before runs, and need not know how many drafts are accepted. The other executor, with
    all its ranks, receives batches in which every token is known.
    """

    runs_ahead = True

    def __init__(
        self,
        executor: Executor,
        max_drafts: int,
        make_drafter: Callable[[Arrival], Drafter],
        policy: DraftPolicy | None = None,
    ):
        """Wrap `executor`. A row gets at most `max_drafts` drafts; `make_drafter` is called for each request that takes
        a slot. The policy chooses how many drafts are verified; without one, all of them are."""
        self.max_drafts = max_drafts
        self.block_size, self.block_bytes = executor.block_size, executor.block_bytes
        self.cache_groups, self.takes_spans = executor.cache_groups, executor.takes_spans
        self.max_prompt_logits = executor.max_prompt_logits
        self._executor = executor
        self._make_drafter, self._policy = make_drafter, policy
        self._slots: dict[int, DraftedSlot] = {}
        self._error: BaseException | None = None  # the error of the step that failed
        self._thread = ThreadPoolExecutor(1, "drafts")

    def free_bytes(self) -> int:
        return self._executor.free_bytes()

    def allocate(self, num_blocks: int) -> None:
        self._executor.allocate(num_blocks)

    def warm_up(self) -> None:
        self._executor.warm_up()

    def load_adapter(self, adapter: tuple[str, ...]) -> None:
        self._thread.submit(self._executor.load_adapter, adapter).result()  # after the steps that were launched

    def drop_adapter(self, adapter_id: str) -> None:
        self._thread.submit(self._executor.drop_adapter, adapter_id)

    def launch(self, batch: Batch) -> DraftingStep:
        step = DraftingStep()
        step.output = self._thread.submit(self._run, batch, step)
        return step

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._executor.close()

    def _run(self, batch: Batch, step: DraftingStep) -> StepOutput:
        try:
            if self._error:  # An earlier step has failed: the state that this one starts from is undefined.
                raise self._error
            return self._compute(batch, step)
        except BaseException as error:
            self._error = error
            if not step.drafted.done():  # otherwise `drafts` would wait forever
                step.drafted.set_exception(error)
            raise

    def _compute(self, batch: Batch, step: DraftingStep) -> StepOutput:
        for arrival in batch.arrivals:
            if previous := self._slots.get(arrival.slot):
                previous.drafter.end(previous.token_ids)
            max_len = arrival.prompt_len + max(arrival.sampling.max_new_tokens - 1, 0)
            self._slots[arrival.slot] = DraftedSlot(list(arrival.token_ids), max_len, self._make_drafter(arrival))
        began = time.perf_counter()
        filled, drafts = self._fill_in(batch)
        step.drafted.set_result(drafts)
        launched = time.perf_counter()
        running = self._executor.launch(filled)
        if batch.has_mask:
            running.mask(step.masked.result())
        output = running.result()
        if self._policy:
            self._policy.learn(filled.rows, output, time.perf_counter() - launched, launched - began)
        self._append(filled.rows, output)
        return output._replace(num_drafts=sum(map(len, drafts.values())))

    def _fill_in(self, batch: Batch) -> tuple[Batch, dict[int, Sequence[int]]]:
        """Return the batch with all its tokens, and the drafts that were added to it, by slot."""
        rows = [
            self._slots[row.slot].fill_in(row) if row.max_drafts or row.token_ids[0] == PENDING else row
            for row in batch.rows
        ]
        offers = self._offers(rows, batch.max_drafts)
        if offers and self._policy:
            levels = [(self._slots[rows[index].slot].level, len(drafts)) for index, drafts in offers]
            counts = self._policy.choose_for(rows, levels)
            offers = [(index, drafts[:count]) for (index, drafts), count in zip(offers, counts, strict=True) if count]
        added = {}
        for index, drafts in offers:
            row = rows[index]
            added[row.slot] = drafts
            rows[index] = row._replace(token_ids=[*row.token_ids, *drafts], num_sampled=row.num_sampled + len(drafts))
        return batch._replace(rows=[row._replace(max_drafts=0) for row in rows], max_drafts=0), added

    def _offers(self, rows: Sequence[Row], max_drafts: int) -> list[tuple[int, Sequence[int]]]:
        """Return the drafts that may be added to the rows, by index."""
        if self._policy and not self._policy.wants_offers:
            return []
        offers = []
        for index, row in enumerate(rows):
            if row.max_drafts and max_drafts > 0:
                slot = self._slots[row.slot]
                if self._policy:
                    slot.judge(self._policy.acceptance)
                if drafts := slot.offer(row, max_drafts):
                    offers.append((index, drafts))
                    max_drafts -= len(drafts)
        return offers

    def _append(self, rows: Sequence[Row], output: StepOutput) -> None:
        """Add the tokens of a step to those of its slots."""
        sampled = iter(output.token_ids)
        for row in rows:
            for slot in (row.slot, *row.forks) if row.num_sampled else ():
                self._slots[slot].token_ids += next(sampled)
