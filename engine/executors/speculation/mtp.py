"""Drafts of the model's own MTP layer or of an EAGLE-3 head, which need a hidden state of each token beside the token
behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace

from engine.core.types import Batch, Row
from engine.executors.speculation.policy import DraftPolicy
from engine.executors.speculation.requests import DraftedSlot, Drafts
from engine.executors.speculation.draft_model import SHORT, DraftModel, DraftRow, ModelDrafts, Wish
from engine.executors.speculation.verified_rows import Verified

NUM_KEPT = 7 * SHORT  # states of the last tokens of a slot that stay on a device where steps are launched ahead
MAX_PASSED = NUM_KEPT - 2 * SHORT  # steps that may be launched ahead until the layer reads their states


class MtpLayer(DraftModel, Protocol):
    """An MTP layer or an EAGLE-3 head on a device."""

    # By slot, its own hidden state of the last token it has sampled, if it samples one token in a run.
    drafted_states: dict[int, np.ndarray]

    @property
    def kept_states(self) -> Callable[[int, int, int], np.ndarray] | None:
        """Return the states of the last NUM_KEPT tokens of a slot, from one position to another. None where steps are
        not launched ahead: the states of a step are lost there when the next one is computed."""
        ...

    def step_states(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the hidden states of all tokens of the step that has just run, [tokens, ...]. They are arrays of
        numbers, f32 [tokens, H], or stand for states on a device, then 0 stands for zeros."""
        ...


class Unread:
    """Hidden states of known tokens of a slot that the layer has not read, from position `start` on. They are put
    together when they are read: most steps add one to each slot."""

    __slots__ = ("_pieces", "end", "start")

    def __init__(self, start: int, states: np.ndarray):
        """Take states, [n, ...]."""
        self._pieces = [states]
        self.start, self.end = start, start + len(states)

    def append(self, states: np.ndarray) -> None:
        self._pieces.append(states)
        self.end += len(states)

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def states(self) -> np.ndarray:
        return self._pieces[0] if len(self._pieces) == 1 else np.concatenate(self._pieces)


class MtpDrafts(ModelDrafts):
    """Source of drafts that owns an MTP layer or an EAGLE-3 head.

    Position p of the layer reads the hidden state of token p and the token p + 1, and drafts token p + 2. The states of
    a step exist only until the next one, so they are kept until the layer reads them: when it drafts, or at the latest
    when a slot has more than SHORT of them, as after a piece of a prompt. Those of steps that are launched ahead stay
    on the device, and the layer reads them after MAX_PASSED steps, for all slots together. They are dropped instead
    while reading has cost more than drafts have saved. States that were dropped or never seen, such as those of the
    last tokens of a cached prefix, are read as zeros; a request that lacks more than SHORT of them has no drafts.
    """

    _model: MtpLayer

    def __init__(self, model: MtpLayer, vocab_size: int, method: str):
        super().__init__(model, vocab_size)
        self.method = method
        self._unread: dict[int, Unread] = {}
        self._num_passed = 0  # steps that were launched ahead since their states were read

    def begin(self, batch: Batch, slots: Mapping[int, DraftedSlot]) -> None:
        super().begin(batch, slots)
        for arrival in batch.arrivals:
            self._unread.pop(arrival.slot, None)

    def read(
        self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], policy: DraftPolicy | None, noted: Any
    ) -> None:
        self._keep_all(rows, slots, noted)
        self._read_long({slot: slots[slot].token_ids for slot in self._unread if slot in slots}, _step_s(rows, policy))

    def may_pass(self, batch: Batch) -> bool:
        return not batch.arrivals and all(len(row.token_ids) == 1 and not row.forks for row in batch.rows)

    def note(self, rows: Sequence[Row]) -> np.ndarray:
        return self._model.step_states(rows)

    def keep(self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], policy: DraftPolicy | None) -> bool:
        self._num_passed += 1
        if self._num_passed < MAX_PASSED:
            return False
        self._catch_up([(row.slot, min(row.start, len(slots[row.slot].token_ids) - 2) + 1) for row in rows])
        token_ids = {row.slot: slots[row.slot].token_ids for row in rows if row.slot in self._unread}
        if policy and not policy.wants_offers:
            for slot in token_ids:
                del self._unread[slot]
            return False
        return self._read_long(token_ids, _step_s(rows, policy), waits=False)

    def _catch_up(self, ends: Iterable[tuple[int, int]]) -> None:
        """Note the states of steps that were launched ahead. `ends` are slots and the positions behind those states."""
        self._num_passed, kept_states = 0, self._model.kept_states
        assert kept_states
        for slot, end in ends:
            unread = self._unread.get(slot)
            if unread is None or unread.end >= end:
                continue
            if end - unread.start > NUM_KEPT:
                del self._unread[slot]
            else:
                unread.append(kept_states(slot, unread.end, end))

    def _keep_all(self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], noted: np.ndarray) -> None:
        first, noted = 0, noted.copy()
        for row in rows:
            end = first + len(row.token_ids)
            for slot in (row.slot, *row.forks) if row.forks else (row.slot,):
                if slot in slots:
                    num_known = len(slots[slot].token_ids) - 1 - row.start  # those before a known token
                    self._keep(slot, row.start, noted[first : min(end, first + max(num_known, 0))])
            first = end

    def drafts(
        self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], max_drafts: int, policy: DraftPolicy | None
    ) -> Drafts:
        if self._num_passed:
            self._catch_up([(row.slot, row.start) for row in rows])
        able = [row if self._has_last(row.slot, slots[row.slot]) else replace(row, max_drafts=0) for row in rows]
        return super().drafts(able, slots, max_drafts, policy)

    def _has_read(self, wish: Wish) -> bool:
        num_valid = self._model.cache.num_valid(wish.slot)
        return wish.slot not in self._unread and num_valid == len(wish.request.token_ids) - 1

    def _row_ahead(self, wish: Wish, verified: Verified, noted: Any) -> DraftRow:
        row, first = super()._row_ahead(wish, verified, noted), verified.first_choice
        return row._replace(start=row.start - 1, states=noted[first : first + len(row.token_ids)])

    def _note_read(self, wish: Wish) -> None:
        if unread := self._unread.pop(wish.slot, None):
            self._model.cache.advance(wish.slot, unread.end)

    def _has_last(self, slot: int, request: DraftedSlot) -> bool:
        """Return whether the state is there from which the layer drafts."""
        unread = self._unread.get(slot)
        return unread is not None and unread.end == len(request.token_ids) - 1

    def _keep(self, slot: int, start: int, states: np.ndarray) -> None:
        """Keep new states of a slot, from position `start` on, unless too many before them are missing."""
        old = self._unread.get(slot)
        if old is not None and old.end == start:
            old.append(states)
        elif len(states) and start - self._model.cache.num_valid(slot) <= SHORT:
            self._unread[slot] = Unread(start, states)

    def _row(self, slot: int, token_ids: Sequence[int], num_answered: int = -1) -> DraftRow:
        """Return a row that reads the states of a slot. `token_ids` are all its known tokens. It samples a token if
        `num_answered` says how many of them are of the answer."""
        unread = self._unread.pop(slot)
        states, end = unread.states, unread.end
        start = min(self._model.cache.num_valid(slot), unread.start)
        self._model.cache.advance(slot, end)
        if start < unread.start:
            missing = np.zeros((unread.start - start, *states.shape[1:]), states.dtype)
            states = np.concatenate([missing, states])
        return DraftRow(slot, start, token_ids[start + 1 : end + 1], num_answered >= 0, max(num_answered, 0), states)

    def _all_but_last(self, slot: int, token_ids: Sequence[int]) -> DraftRow:
        """Return a row that reads the states of a slot except the last one, from which the layer drafts later."""
        start, states = self._unread[slot].start, self._unread[slot].states
        self._unread[slot] = Unread(start, states[:-1])
        row = self._row(slot, token_ids)
        self._unread[slot] = Unread(start + len(states) - 1, states[-1:].copy())
        return row

    def _read_long(self, token_ids: Mapping[int, Sequence[int]], step_s: float, *, waits: bool = True) -> bool:
        """Let the layer read the states of each slot that has more than SHORT of them, except the last one, from
        which it drafts later. They are dropped instead while reading has cost more than drafts have saved.
        `token_ids` are the known tokens of the slots. A device that runs ahead need not be waited for, except where
        there are more than a run takes. Return whether the layer reads any."""
        long = [slot for slot in token_ids if len(self._unread.get(slot, ())) > SHORT]
        if not self._costs.may_read(sum(len(self._unread[slot]) for slot in long), step_s):
            for slot in long:
                del self._unread[slot]
            return False
        for piece in _pieces([self._all_but_last(slot, token_ids[slot]) for slot in long], self._model.chunk):
            num_tokens, began = sum(len(row.token_ids) for row in piece), time.perf_counter()
            if waits or not self._model.begin:
                self._model.run(piece, 0)
                self._costs.observe(0, num_tokens, time.perf_counter() - began)
            else:
                self._model.begin(piece, 0)
                self.invested_s += self._costs.owe(num_tokens)
            waits = True
        return bool(long)

    def _first_rows(self, wishes: Sequence[Wish], step_s: float) -> tuple[list[DraftRow], list[Wish]]:
        self._read_long({wish.slot: wish.request.token_ids for wish in wishes}, step_s, waits=False)
        ready = [wish for wish in wishes if wish.slot in self._unread]
        answers = [(wish.slot, wish.request.token_ids, wish.request.prompt_len) for wish in ready]
        return [
            self._row(slot, token_ids, len(token_ids) - prompt_len) for slot, token_ids, prompt_len in answers
        ], ready

    def _next_row(self, wish: Wish, drafts: Sequence[int]) -> DraftRow:
        position = len(wish.request.token_ids) + len(drafts) - 2
        num_answered = position + 2 - wish.request.prompt_len
        return DraftRow(wish.slot, position, drafts[-1:], True, num_answered, self._model.drafted_states[wish.slot])


def _step_s(rows: Sequence[Row], policy: DraftPolicy | None) -> float:
    """Return the time of a step with these rows, infinity if it is not known."""
    return (policy and policy.step_s(len(rows))) or float("inf")


def _pieces(rows: Sequence[DraftRow], size: int) -> Iterator[list[DraftRow]]:
    """Yield the rows in lists of at most `size` tokens. A longer row is divided."""
    piece: list[DraftRow] = []
    room = size
    for row in rows:
        while row.token_ids:
            assert row.states is not None
            piece.append(row._replace(token_ids=row.token_ids[:room], states=row.states[:room]))
            count = len(piece[-1].token_ids)
            row = row._replace(start=row.start + count, token_ids=row.token_ids[count:], states=row.states[count:])
            room -= count
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece
