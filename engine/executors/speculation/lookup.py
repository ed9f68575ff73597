"""Drafts from earlier tokens: each slot has a drafter that looks up what may follow. It needs no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.core.types import Arrival, Batch, Row
from engine.executors.speculation.ngram import NgramDrafter
from engine.executors.speculation.policy import DraftPolicy
from engine.executors.speculation.proposer import Drafts, Proposer, Requests
from engine.executors.speculation.requests import DraftedRequest
from engine.executors.speculation.suffix import RecentAnswers, SuffixDrafter
from engine.settings.config import Config


class Drafter(Protocol):
    """Proposes the tokens that may follow those of one slot."""

    @property
    def level(self) -> int:
        """Return how sure it is of the last proposal, from 0. The policy counts how often each level is correct."""
        ...

    def propose(self, token_ids: list[int], max_drafts: int) -> Sequence[int]:
        """Return at most `max_drafts` tokens that may follow `token_ids`, or none when no continuation is likely.

        `token_ids` are all tokens of the slot. The caller calls this only when all of them are known, and each call
        repeats the tokens of the call before and appends to them.
        """
        ...

    def end(self, token_ids: Sequence[int]) -> None:
        """End the request, which has left its slot. `token_ids` are all its known tokens."""
        ...


class LookupProposer(Proposer):
    """Proposer that owns a `Drafter` for each slot."""

    def __init__(self, method: str, make_drafter: Callable[[Arrival], Drafter]):
        """Call `make_drafter` for each request that takes a slot."""
        self.method, self._make_drafter = method, make_drafter
        self._drafters: dict[int, Drafter] = {}

    @classmethod
    def of(cls, config: Config) -> LookupProposer:
        """Return the proposer of SPECULATE_METHOD, which is a lookup."""
        assert config.speculate_method in ("ngram", "suffix")
        if config.speculate_method == "suffix":
            answers = RecentAnswers()
            return cls("suffix", lambda arrival: SuffixDrafter(arrival, answers))
        return cls("ngram", lambda arrival: NgramDrafter(config))

    def place(self, batch: Batch, requests: Requests) -> None:
        for arrival in batch.arrivals:
            if arrival.slot in requests:
                self._drafters[arrival.slot].end(requests[arrival.slot].token_ids)
            self._drafters[arrival.slot] = self._make_drafter(arrival)

    def propose(self, rows: Sequence[Row], requests: Requests, max_drafts: int, policy: DraftPolicy | None) -> Drafts:
        if policy and not policy.may_draft:
            return []
        offers: Drafts = []
        for index, row in enumerate(rows):
            if row.max_drafts and max_drafts > 0:
                request = requests[row.slot]
                if policy:
                    request.check_drafts(policy.acceptance)
                if drafts := self._offer(row, request, max_drafts):
                    offers.append((index, drafts))
                    max_drafts -= len(drafts)
        if not (offers and policy):
            return offers
        counts = policy.choose_for(rows, [(requests[rows[index].slot].level, len(drafts)) for index, drafts in offers])
        return [(index, drafts[:count]) for (index, drafts), count in zip(offers, counts, strict=True) if count]

    def _offer(self, row: Row, request: DraftedRequest, max_drafts: int) -> Sequence[int]:
        """Return at most `max_drafts` tokens that may follow those of the filled row."""
        max_drafts = min(row.max_drafts, max_drafts, request.max_len - 1 - row.start)
        if max_drafts <= 0:
            return ()
        drafter = self._drafters[row.slot]
        drafts = drafter.propose(request.token_ids, max_drafts)
        request.set_drafts(drafts, 2 * drafter.level + request.was_correct)
        return drafts
