"""Drafts from earlier tokens: each slot has a drafter that looks up what may follow. It needs no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from engine.core.types import Arrival, Batch, Row
from engine.executors.speculation.policy import DraftPolicy
from engine.executors.speculation.requests import DraftedSlot, Drafts, Judged
from engine.executors.speculation.ngram import NgramDrafter
from engine.executors.speculation.suffix import RecentAnswers, SuffixDrafter
from engine.executors.speculation.verified_rows import RunningStep
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


class LookupDrafts:
    """Source of drafts that owns a `Drafter` for each slot."""

    block_bytes = 0
    invested_s = 0.0

    def __init__(self, method: str, make_drafter: Callable[[Arrival], Drafter]):
        """Call `make_drafter` for each request that takes a slot."""
        self.method, self._make_drafter = method, make_drafter
        self._drafters: dict[int, Drafter] = {}

    @classmethod
    def of(cls, config: Config) -> LookupDrafts:
        """Return the source of SPECULATE_METHOD, which is a lookup."""
        assert config.speculate_method in ("ngram", "suffix")
        if config.speculate_method == "suffix":
            answers = RecentAnswers()
            return cls("suffix", lambda arrival: SuffixDrafter(arrival, answers))
        return cls("ngram", lambda arrival: NgramDrafter(config))

    def allocate(self, num_blocks: int) -> None:
        """Do nothing: there is no cache."""

    def begin(self, batch: Batch, slots: Mapping[int, DraftedSlot]) -> None:
        for arrival in batch.arrivals:
            if arrival.slot in slots:
                self._drafters[arrival.slot].end(slots[arrival.slot].token_ids)
            self._drafters[arrival.slot] = self._make_drafter(arrival)

    def drafts(
        self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], max_drafts: int, policy: DraftPolicy | None
    ) -> Drafts:
        if policy and not policy.wants_offers:
            return []
        offers: Drafts = []
        for index, row in enumerate(rows):
            if row.max_drafts and max_drafts > 0:
                slot = slots[row.slot]
                if policy:
                    slot.judge(policy.acceptance)
                if drafts := self._offer(row, slot, max_drafts):
                    offers.append((index, drafts))
                    max_drafts -= len(drafts)
        if not (offers and policy):
            return offers
        counts = policy.choose_for(rows, [(slots[rows[index].slot].level, len(drafts)) for index, drafts in offers])
        return [(index, drafts[:count]) for (index, drafts), count in zip(offers, counts, strict=True) if count]

    def begin_ahead(
        self, running: RunningStep, batch: Batch, slots: Mapping[int, DraftedSlot], policy: DraftPolicy | None
    ) -> bool:
        return False

    def finish(self, slots: Mapping[int, DraftedSlot]) -> Drafts:
        return []

    def read(
        self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], policy: DraftPolicy | None, noted: Any
    ) -> None:
        """Do nothing: a lookup needs only tokens."""

    def may_pass(self, batch: Batch) -> bool:
        return True

    def note(self, rows: Sequence[Row]) -> None:
        """Do nothing, as in `read`."""

    def keep(self, rows: Sequence[Row], slots: Mapping[int, DraftedSlot], policy: DraftPolicy | None) -> bool:
        return False

    def learn(self, judged: Sequence[Judged], policy: DraftPolicy, gain_s: float, step_s: float) -> None:
        """Do nothing: a lookup invests no time, and all its drafts are judged, also those that no step has verified."""

    def _offer(self, row: Row, slot: DraftedSlot, max_drafts: int) -> Sequence[int]:
        """Return at most `max_drafts` tokens that may follow those of the filled row."""
        max_drafts = min(row.max_drafts, max_drafts, slot.max_len - 1 - row.start)
        if max_drafts <= 0:
            return ()
        drafter = self._drafters[row.slot]
        drafts = drafter.propose(slot.token_ids, max_drafts)
        slot.note_drafts(drafts, 2 * drafter.level + slot.was_right)
        return drafts
