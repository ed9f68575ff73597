"""State that speculative decoding keeps of the request in a slot. Independent of how drafts are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from engine.core.types import PENDING, Arrival, Row, StepOutput
from engine.executors.speculation.estimates import AcceptanceRates

FIRST_SHARE, SHARE_DECAY = 0.7, 0.9  # of `share_correct`
RETRY_AFTER = 512  # tokens until a pause of the policy may end for a request that could not be drafted for
NO_DRAFTS: Mapping[int, Sequence[int]] = MappingProxyType({})


class Verification(NamedTuple):
    """The drafts of one row that a step has verified."""

    request: DraftedRequest
    level: int  # of the drafts, see `AcceptanceRates`
    num_drafts: int
    num_accepted: int


@dataclass
class DraftedRequest:
    """The tokens of the request in a slot, and its last drafts."""

    token_ids: list[int]  # prompt, then the known tokens of the answer
    prompt_len: int
    max_len: int  # positions that the request can occupy at most, see `Request.max_len`
    samples_by_tokens: bool = False  # sampling behind drafts depends on them, as with penalties
    drafts: Sequence[int] = ()  # the last ones, whether or not a step has verified them
    drafted_at: int = 0  # number of tokens at that time
    level: int = 0  # of these drafts, see `AcceptanceRates`
    was_correct: bool = True  # the first of them
    share_correct: float = FIRST_SHARE  # running share of correct drafts
    retry_at: int = 0  # number of tokens from which on a pause may end in order to draft for it

    @classmethod
    def of(cls, arrival: Arrival) -> DraftedRequest:
        sampling = arrival.sampling
        max_len = arrival.prompt_len + max(sampling.max_new_tokens - 1, 0)
        by_tokens = bool(sampling.has_penalty or sampling.bad_words or sampling.logit_bias)
        return cls(list(arrival.token_ids), arrival.prompt_len, max_len, by_tokens)

    @property
    def is_deferred(self) -> bool:
        """Return whether a pause need not end for this request, because it can have no drafts for a while."""
        return len(self.token_ids) < self.retry_at

    def fill_in(self, row: Row) -> Row:
        """Return the row with its PENDING token filled in. A request that has meanwhile reached its length limit
        computes its last position again, with the same token."""
        if row.token_ids[0] != PENDING:
            return row
        start = min(len(self.token_ids), self.max_len) - 1
        token_id = max(self.token_ids[start], 0)  # the token is NO_TOKEN if the request has failed
        return replace(row, start=start, token_ids=[token_id, *row.token_ids[1:]])

    def set_drafts(self, drafts: Sequence[int], level: int) -> None:
        """Set the drafts behind the known tokens, which `check_drafts` compares with what follows."""
        self.drafts, self.drafted_at, self.level = drafts, len(self.token_ids), level

    def defer_unless(self, can_draft: bool) -> None:
        """Set whether the answer may be drafted for. It may not for example while a grammar is slow, while reading its
        tokens would cost too much, or if the hidden states are missing that an MTP layer reads."""
        in_answer = len(self.token_ids) > self.prompt_len
        self.retry_at = len(self.token_ids) + RETRY_AFTER if in_answer and not can_draft else 0

    def check_drafts(self, rates: AcceptanceRates) -> None:
        """Compare the last drafts with the tokens that have followed, which are known even if no step has verified
        the drafts."""
        known = self.token_ids[self.drafted_at : self.drafted_at + len(self.drafts)]
        if known and self.drafts:
            pairs = zip(known, self.drafts, strict=False)
            num_correct = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self.drafts = ()
            self.record(rates, self.level, num_correct, len(known))

    def record(self, rates: AcceptanceRates, level: int, num_correct: int, num_known: int) -> None:
        """Record that of the drafts of a level so many were correct, and for how many of them that is known."""
        rates.record(level, num_correct, num_known)
        self.share_correct += (num_correct / num_known - self.share_correct) * (1 - SHARE_DECAY)
        self.was_correct = num_correct > 0


def append_tokens(
    requests: Mapping[int, DraftedRequest],
    rows: Sequence[Row],
    output: StepOutput,
    drafts: Mapping[int, Sequence[int]] = NO_DRAFTS,
) -> list[Verification]:
    """Add the tokens of a step to its requests, which are given by slot. Return how many of the `drafts`, by slot, were
    accepted."""
    sampled, verifications = iter(output.token_ids), []
    for row in rows:
        if row.num_sampled:
            for slot in (row.slot, *row.forks) if row.forks else (row.slot,):
                token_ids, request = next(sampled), requests[slot]
                request.token_ids += token_ids
                if drafts and slot in drafts:
                    verifications.append(Verification(request, request.level, len(drafts[slot]), len(token_ids) - 1))
    return verifications
