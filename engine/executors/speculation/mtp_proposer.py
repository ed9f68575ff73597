"""Proposer with the model's own MTP layer or an EAGLE-3 head, which need a hidden state of each token beside the token
behind it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from engine.core.types import Batch, Row
from engine.executors.speculation.draft_model import NUM_KEPT, SHORT, DraftRow, MtpLayer
from engine.executors.speculation.model_proposer import DraftModelProposer, DraftPlan
from engine.executors.speculation.policy import DraftPolicy
from engine.executors.speculation.proposer import Drafts, Requests
from engine.executors.speculation.requests import DraftedRequest
from engine.executors.speculation.verified_rows import VerifiedRow

MAX_PLAIN_STEPS = NUM_KEPT - 2 * SHORT  # steps that may be launched ahead until the layer reads their states


class PendingStates:
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


class MtpProposer(DraftModelProposer):
    """Proposer that owns an MTP layer or an EAGLE-3 head.

    Position p of the layer reads the hidden state of token p and the token p + 1, and drafts token p + 2. The states of
    a step exist only until the next one, so they are kept until the layer reads them: when it drafts, or at the latest
    when a slot has more than SHORT of them, as after a piece of a prompt. Those of steps that are launched ahead stay
    on the device, and the layer reads them after MAX_PLAIN_STEPS steps, for all slots together. They are dropped
    instead while reading has cost more than drafts have saved. States that were dropped or never seen, such as those of
    the last tokens of a cached prefix, are read as zeros; a request that lacks more than SHORT of them has no drafts.
    """

    _model: MtpLayer

    def __init__(self, model: MtpLayer, vocab_size: int, method: str):
        super().__init__(model, vocab_size)
        self.method = method
        self._pending: dict[int, PendingStates] = {}
        self._num_plain_steps = 0  # since the layer has read their states

    def place(self, batch: Batch, requests: Requests) -> None:
        super().place(batch, requests)
        for arrival in batch.arrivals:
            self._pending.pop(arrival.slot, None)

    def hidden_states(self, rows: Sequence[Row]) -> np.ndarray:
        return self._model.step_states(rows)

    def add_hidden_states(
        self, rows: Sequence[Row], requests: Requests, policy: DraftPolicy | None, states: Any
    ) -> None:
        first, states = 0, states.copy()
        for row in rows:
            end = first + len(row.token_ids)
            for slot in (row.slot, *row.forks) if row.forks else (row.slot,):
                if slot in requests:
                    num_known = len(requests[slot].token_ids) - 1 - row.start  # those before a known token
                    self._add(slot, row.start, states[first : min(end, first + max(num_known, 0))])
            first = end
        token_ids = {slot: requests[slot].token_ids for slot in self._pending if slot in requests}
        self._read_long(token_ids, _step_s(rows, policy))

    def allows_plain_step(self, batch: Batch) -> bool:
        return not batch.arrivals and all(len(row.token_ids) == 1 and not row.forks for row in batch.rows)

    def after_plain_step(self, rows: Sequence[Row], requests: Requests, policy: DraftPolicy | None) -> bool:
        self._num_plain_steps += 1
        if self._num_plain_steps < MAX_PLAIN_STEPS:
            return False
        self._catch_up([(row.slot, min(row.start, len(requests[row.slot].token_ids) - 2) + 1) for row in rows])
        token_ids = {row.slot: requests[row.slot].token_ids for row in rows if row.slot in self._pending}
        if policy and not policy.may_draft:
            for slot in token_ids:
                del self._pending[slot]
            return False
        return self._read_long(token_ids, _step_s(rows, policy), waits=False)

    def _catch_up(self, ends: Iterable[tuple[int, int]]) -> None:
        """Add the states of steps that were launched ahead. `ends` are slots and the positions behind those states."""
        self._num_plain_steps, kept_states = 0, self._model.kept_states
        assert kept_states
        for slot, end in ends:
            pending = self._pending.get(slot)
            if pending is None or pending.end >= end:
                continue
            if end - pending.start > NUM_KEPT:
                del self._pending[slot]
            else:
                pending.append(kept_states(slot, pending.end, end))

    def propose(self, rows: Sequence[Row], requests: Requests, max_drafts: int, policy: DraftPolicy | None) -> Drafts:
        if self._num_plain_steps:
            self._catch_up([(row.slot, row.start) for row in rows])
        able = [row if self._has_last(row.slot, requests[row.slot]) else replace(row, max_drafts=0) for row in rows]
        return super().propose(able, requests, max_drafts, policy)

    def _has_read(self, plan: DraftPlan) -> bool:
        num_valid = self._model.cache.num_valid(plan.slot)
        return plan.slot not in self._pending and num_valid == len(plan.request.token_ids) - 1

    def _row_ahead(self, plan: DraftPlan, verified: VerifiedRow, states: Any) -> DraftRow:
        row, first = super()._row_ahead(plan, verified, states), verified.first_choice
        return row._replace(start=row.start - 1, states=states[first : first + len(row.token_ids)])

    def _mark_read(self, plan: DraftPlan) -> None:
        if pending := self._pending.pop(plan.slot, None):
            self._model.cache.advance(plan.slot, pending.end)

    def _has_last(self, slot: int, request: DraftedRequest) -> bool:
        """Return whether the state is there from which the layer drafts."""
        pending = self._pending.get(slot)
        return pending is not None and pending.end == len(request.token_ids) - 1

    def _add(self, slot: int, start: int, states: np.ndarray) -> None:
        """Add new states of a slot, from position `start` on, unless too many before them are missing."""
        old = self._pending.get(slot)
        if old is not None and old.end == start:
            old.append(states)
        elif len(states) and start - self._model.cache.num_valid(slot) <= SHORT:
            self._pending[slot] = PendingStates(start, states)

    def _row(self, slot: int, token_ids: Sequence[int], num_answered: int = -1) -> DraftRow:
        """Return a row that reads the states of a slot. `token_ids` are all its known tokens. It samples a token if
        `num_answered` says how many of them are of the answer."""
        pending = self._pending.pop(slot)
        states, end = pending.states, pending.end
        start = min(self._model.cache.num_valid(slot), pending.start)
        self._model.cache.advance(slot, end)
        if start < pending.start:
            missing = np.zeros((pending.start - start, *states.shape[1:]), states.dtype)
            states = np.concatenate([missing, states])
        return DraftRow(slot, start, token_ids[start + 1 : end + 1], num_answered >= 0, max(num_answered, 0), states)

    def _all_but_last(self, slot: int, token_ids: Sequence[int]) -> DraftRow:
        """Return a row that reads the states of a slot except the last one, from which the layer drafts later."""
        start, states = self._pending[slot].start, self._pending[slot].states
        self._pending[slot] = PendingStates(start, states[:-1])
        row = self._row(slot, token_ids)
        self._pending[slot] = PendingStates(start + len(states) - 1, states[-1:].copy())
        return row

    def _read_long(self, token_ids: Mapping[int, Sequence[int]], step_s: float, *, waits: bool = True) -> bool:
        """Let the layer read the states of each slot that has more than SHORT of them, except the last one, from
        which it drafts later. They are dropped instead while reading has cost more than drafts have saved.
        `token_ids` are the known tokens of the slots. A device that runs ahead need not be waited for, except where
        there are more than a run takes. Return whether the layer reads any."""
        long = [slot for slot in token_ids if len(self._pending.get(slot, ())) > SHORT]
        if not self._costs.may_read(sum(len(self._pending[slot]) for slot in long), step_s):
            for slot in long:
                del self._pending[slot]
            return False
        for piece in _pieces([self._all_but_last(slot, token_ids[slot]) for slot in long], self._model.chunk):
            num_tokens, began = sum(len(row.token_ids) for row in piece), time.perf_counter()
            if waits or not self._model.launch:
                self._model.run(piece, 0)
                self._costs.observe(0, num_tokens, time.perf_counter() - began)
            else:
                self._model.launch(piece, 0)
                self.invested_s += self._costs.owe(num_tokens)
            waits = True
        return bool(long)

    def _first_rows(self, plans: Sequence[DraftPlan], step_s: float) -> tuple[list[DraftRow], list[DraftPlan]]:
        self._read_long({plan.slot: plan.request.token_ids for plan in plans}, step_s, waits=False)
        ready = [plan for plan in plans if plan.slot in self._pending]
        answers = [(plan.slot, plan.request.token_ids, plan.request.prompt_len) for plan in ready]
        return [
            self._row(slot, token_ids, len(token_ids) - prompt_len) for slot, token_ids, prompt_len in answers
        ], ready

    def _next_row(self, plan: DraftPlan, drafts: Sequence[int]) -> DraftRow:
        position = len(plan.request.token_ids) + len(drafts) - 2
        num_answered = position + 2 - plan.request.prompt_len
        return DraftRow(plan.slot, position, drafts[-1:], True, num_answered, self._model.drafted_states[plan.slot])


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
