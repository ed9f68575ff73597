"""Drafts of a draft model: which rows of a step get how many draft tokens, and the runs of the draft model that make
them. It handles tokens and times, and is independent of tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from engine.core.types import Batch, Row
from engine.executors.speculation.draft_cache import DraftCache
from engine.executors.speculation.draft_costs import DraftCosts
from engine.executors.speculation.policy import DraftPolicy
from engine.executors.speculation.requests import DraftedSlot, Drafts, Judged
from engine.executors.speculation.verified_rows import RunningStep, Verified, only_continues, verified_rows

NUM_LEVELS = 4  # of how often the drafts of a request were right lately
SHORT = 16  # tokens that a row may lack in the draft model's cache and still be drafted for in the same step
CHUNK = 256  # tokens of prompts that a draft model on a CPU reads in one run


class DraftRow(NamedTuple):
    """The tokens of one slot that a run of the draft model computes, from position `start` on."""

    slot: int
    start: int
    token_ids: Sequence[int]
    samples: bool  # a token after the last one
    num_answered: int  # tokens of the answer up to there, which select the random number
    states: np.ndarray | None = None  # [tokens, ...], only for an MTP layer: what it reads beside each token
    # If the step that was launched last still chooses the tokens, its row. The device finds out how many of its drafts
    # are right, samples behind the token that follows these, and adds their number to `num_answered`.
    verified: Verified | None = None


Run = Callable[[Sequence[DraftRow], int], list[list[int]]]


class DraftModel(Protocol):
    """A draft model on a device."""

    cache: DraftCache
    max_seq_len: int
    block_bytes: int
    chunk: int  # tokens of prompts that it reads in one run
    may_follow: bool  # `begin` takes rows that are still verified

    @property
    def begin(self) -> Run | None:
        """Launch a run, and return ids that stand for its drafts in the step that is launched next. None if the step
        needs the tokens themselves."""
        ...

    def allocate(self, num_blocks: int) -> None: ...

    def place(self, batch: Batch) -> None: ...

    def run(self, rows: Sequence[DraftRow], num_drafts: int) -> list[list[int]]:
        """Compute the rows. Return, for each row that samples, one token or several up to `num_drafts`, in which case
        it has also computed all of them but the last."""
        ...

    def finish(self) -> list[list[int]]:
        """Return the drafts of the run that `begin` has launched."""
        ...


class Wish(NamedTuple):
    """A row that gets drafts."""

    row: int  # its index in the step
    slot: int
    request: DraftedSlot
    num_drafts: int  # that it gets


class ModelDrafts:
    """Source of drafts that owns a draft model.

    The policy chooses the numbers of drafts before they are made, from the acceptance by position. The draft model
    reads the tokens of a request when it drafts for it for the first time, at most `chunk` tokens in a step.
    """

    method = "draft"

    def __init__(self, model: DraftModel, vocab_size: int):
        """Take the draft model, and the size of the vocabulary of the target model."""
        self.block_bytes = model.block_bytes
        self.invested_s = 0.0
        self._model, self._vocab_size = model, vocab_size
        self._costs = DraftCosts()
        self._begun: list[Wish] = []  # rows of a run that was launched, whose drafts are not known yet
        self._ahead: list[tuple[Wish, list[int]]] = []  # those of a run for the next step, with ids for its drafts
        self._draft_rows: dict[int, int] = {}  # places of slots in the last run, if it was not waited for

    def allocate(self, num_blocks: int) -> None:
        self._model.allocate(num_blocks)

    def begin(self, batch: Batch, slots: Mapping[int, DraftedSlot]) -> None:
        self._model.place(batch)

    def drafts(
        self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], max_drafts: int, policy: DraftPolicy | None
    ) -> Drafts:
        self.invested_s = 0.0
        if self._ahead:
            made = self._take_ahead(rows)
        elif policy and not policy.wants_offers:
            return []
        else:
            wishes = self._chosen(rows, slots, max_drafts, policy)
            may_begin = not any(wish.request.samples_by_tokens for wish in wishes)
            made = self._make(wishes, policy.step_s(len(rows)) if policy else float("inf"), may_begin) if wishes else []
        for wish, tokens in made:
            wish.request.note_drafts(tokens, _level(wish.request))
        return [(wish.row, tokens) for wish, tokens in made if tokens]

    def begin_ahead(
        self, running: RunningStep, batch: Batch, slots: Mapping[int, DraftedSlot], policy: DraftPolicy | None
    ) -> bool:
        if not self._model.may_follow or (policy and not policy.wants_offers):
            return False
        verified = verified_rows(running.rows, slots, self._draft_rows)
        if not only_continues(batch, verified) or not self._has_room(batch.rows, slots, verified):
            return False
        wishes = self._chosen(batch.rows, slots, batch.max_drafts, policy)
        if not wishes or any(wish.request.samples_by_tokens or not self._has_read(wish) for wish in wishes):
            return False
        self.begin(batch, slots)
        rows = [self._row_ahead(wish, verified[wish.slot], running.noted) for wish in wishes]
        assert self._model.begin
        ids = self._model.begin(rows, max(wish.num_drafts for wish in wishes))
        self._ahead = list(zip(wishes, ids, strict=True))
        self._draft_rows = {wish.slot: index for index, wish in enumerate(wishes)}
        return True

    def _has_room(
        self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], verified: Mapping[int, Verified]
    ) -> bool:
        """Return whether the draft model can compute as many positions as the rows may have at most."""
        most = min(self._model.max_seq_len, self._model.cache.max_len) - 1 - max(row.max_drafts for row in rows)
        return all(len(slots[slot].token_ids) + each.num_drafts <= most for slot, each in verified.items())

    def _has_read(self, wish: Wish) -> bool:
        """Return whether the draft model has read all known tokens of a request."""
        return self._model.cache.num_valid(wish.slot) == len(wish.request.token_ids)

    def _row_ahead(self, wish: Wish, verified: Verified, noted: Any) -> DraftRow:
        """Return a row that reads the tokens that a running step chooses for a request."""
        num_known, num_tokens = len(wish.request.token_ids), verified.num_drafts + 1
        num_answered = num_known + 1 - wish.request.prompt_len
        return DraftRow(wish.slot, num_known, [0] * num_tokens, True, num_answered, None, verified)

    def _take_ahead(self, rows: Sequence[Row]) -> list[tuple[Wish, list[int]]]:
        """Return the drafts of the run that was launched before the rows were known, as many as fit behind them."""
        made = []
        for wish, ids in self._ahead:
            row = rows[wish.row]
            count = max(min(wish.num_drafts, row.max_drafts, wish.request.max_len - 1 - row.start), 0)
            made.append((wish._replace(num_drafts=count), ids[:count]))
            self._note_read(wish)
        self._begun, self._ahead = [wish for wish, _ in made], []
        return [(wish, ids) for wish, ids in made if ids]

    def _note_read(self, wish: Wish) -> None:
        """Note that the draft model has read all tokens of a request."""
        self._model.cache.start(wish.slot, wish.request.token_ids)
        self._model.cache.advance(wish.slot, len(wish.request.token_ids))

    def finish(self, slots: Mapping[int, DraftedSlot]) -> Drafts:
        begun, self._begun = self._begun, []
        found: Drafts = []
        for wish, tokens in zip(begun, self._model.finish() if begun else (), strict=True):
            if not wish.num_drafts:
                continue
            self._extend(wish, [], tokens)
            # All of them: an id that the target model does not have is never accepted.
            found.append((wish.row, tokens[: wish.num_drafts]))
            wish.request.note_drafts(found[-1][1], _level(wish.request))
        return found

    def read(
        self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], policy: DraftPolicy | None, noted: Any
    ) -> None:
        """Do nothing: the draft model needs only tokens, which it reads when it drafts."""

    def may_pass(self, batch: Batch) -> bool:
        return True

    def note(self, rows: Sequence[Row]) -> Any:
        """Do nothing, as in `read`."""

    def keep(self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], policy: DraftPolicy | None) -> bool:
        return False

    def learn(self, judged: Sequence[Judged], policy: DraftPolicy, gain_s: float, step_s: float) -> None:
        for slot, level, num_drafts, num_right in judged:
            slot.record(policy.acceptance, level, num_right, min(num_right + 1, num_drafts))
        self._costs.repay(gain_s, step_s)

    def _chosen(
        self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], max_drafts: int, policy: DraftPolicy | None
    ) -> list[Wish]:
        """Return the rows that get drafts, each with as many as the policy chooses or else as many as it may have. With
        a policy there are none beside prompts."""
        wishes = self._wishes(rows, slots, max_drafts)
        if not wishes or not policy:
            return wishes
        if any(len(row.token_ids) > row.num_sampled for row in rows):
            return []
        levels = [(_level(wish.request), wish.num_drafts) for wish in wishes]
        counts = policy.choose_for(rows, levels)
        return [wish._replace(num_drafts=count) for wish, count in zip(wishes, counts, strict=True) if count]

    def _wishes(self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], max_drafts: int) -> list[Wish]:
        """Return the rows that may have drafts, each with as many as it may have."""
        wishes = []
        for index, row in enumerate(rows):
            request = slots[row.slot]
            count = min(row.max_drafts, request.max_len - 1 - row.start)
            count = min(count, self._model.max_seq_len - len(request.token_ids) + 1)
            request.note_ability(count > 0)
            if (count := min(count, max_drafts)) > 0:
                wishes.append(Wish(index, row.slot, request, count))
                max_drafts -= count
        return wishes

    def _make(self, wishes: Sequence[Wish], step_s: float, may_begin: bool) -> list[tuple[Wish, list[int]]]:
        """Return the draft tokens of the rows. `step_s` is the time of a step without drafts. If `may_begin`, they may
        be ids that stand for tokens of a run that was only launched."""
        rows, ready = self._first_rows(wishes, step_s)
        if may_begin and ready and self._model.begin and all(len(row.token_ids) <= SHORT for row in rows):
            ids = self._run(self._model.begin, rows, max(wish.num_drafts for wish in ready))
            self._begun, self._draft_rows = ready, {wish.slot: index for index, wish in enumerate(ready)}
            return [(wish, each[: wish.num_drafts]) for wish, each in zip(ready, ids, strict=True)]
        made: list[tuple[Wish, list[int]]] = [(wish, []) for wish in ready]
        alive, self._draft_rows = made, {}
        while rows:
            left = max((wish.num_drafts - len(drafts) for wish, drafts in alive), default=0)
            for (wish, drafts), tokens in zip(alive, self._run(self._model.run, rows, left), strict=True):
                self._extend(wish, drafts, tokens)
            position = max((len(drafts) for _, drafts in alive), default=0)
            alive = [each for each in alive if len(each[1]) == position < each[0].num_drafts]
            rows = [self._next_row(wish, drafts) for wish, drafts in alive]
        return made

    def _extend(self, wish: Wish, drafts: list[int], tokens: Sequence[int]) -> None:
        """Add the tokens of a run to the drafts of a row, up to their number and to the first that the target model
        does not have: padded vocabularies may have different sizes."""
        for token_id in tokens[: wish.num_drafts - len(drafts)]:
            if not 0 <= token_id < self._vocab_size:
                return
            drafts.append(token_id)
        for token_id in tokens[: len(drafts)][:-1]:
            self._model.cache.guess(wish.slot, token_id)

    def _first_rows(self, wishes: Sequence[Wish], step_s: float) -> tuple[list[DraftRow], list[Wish]]:
        """Return the rows of the first run, and the wishes that it samples for. The others only read tokens."""
        rows, ready, budget = [], [], self._model.chunk
        for wish in wishes:
            token_ids = wish.request.token_ids
            start, end = self._model.cache.start(wish.slot, token_ids), len(token_ids)
            if end - start > SHORT:
                if not self._costs.may_read(end - start, step_s):
                    wish.request.note_ability(False)
                    continue
                end = min(end, start + budget)
                budget -= end - start
            if end > start:
                samples, num_answered = end == len(token_ids), end - wish.request.prompt_len
                rows.append(DraftRow(wish.slot, start, token_ids[start:end], samples, num_answered))
                self._model.cache.advance(wish.slot, end)
                if samples:
                    ready.append(wish)
        return rows, ready

    def _next_row(self, wish: Wish, drafts: Sequence[int]) -> DraftRow:
        self._model.cache.guess(wish.slot, drafts[-1])
        position = len(wish.request.token_ids) + len(drafts) - 1
        return DraftRow(wish.slot, position, drafts[-1:], True, position + 1 - wish.request.prompt_len)

    def _run(self, run: Run, rows: Sequence[DraftRow], num_drafts: int) -> list[list[int]]:
        began = time.perf_counter()
        tokens = run(rows, num_drafts)
        seconds, depth = time.perf_counter() - began, len(tokens[0]) if tokens else 1
        num_read = sum(len(row.token_ids) for row in rows if len(row.token_ids) > SHORT)
        self.invested_s += self._costs.observe(len(tokens), num_read, seconds, depth)
        return tokens


def _level(slot: DraftedSlot) -> int:
    return min(int(NUM_LEVELS * slot.share_right), NUM_LEVELS - 1)
