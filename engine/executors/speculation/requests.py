"""State that drafting keeps of the request in a slot. Independent of how drafts are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from msgspec.structs import replace

from engine.core.types import PENDING, Row
from engine.executors.speculation.estimates import Acceptance

Drafts = list[tuple[int, Sequence[int]]]  # the draft tokens of rows, by the index of the row in its step
Judged = tuple["DraftedSlot", int, int, int]  # slot, level of its drafts, their number, how many of them were right
FIRST_SHARE, SHARE_DECAY = 0.7, 0.9  # of `share_right`
RETRY_AFTER = 512  # tokens until a rest of the policy may end for a slot that could not be drafted for


@dataclass
class DraftedSlot:
    """The tokens of the request in a slot, and its last drafts."""

    token_ids: list[int]  # prompt, then the known tokens of the answer
    prompt_len: int
    max_len: int  # positions that the request can occupy at most, see `Request.max_len`
    samples_by_tokens: bool = False  # sampling behind drafts depends on them, as with penalties
    drafts: Sequence[int] = ()  # the last ones, whether or not a step has verified them
    drafted_at: int = 0  # number of tokens at that time
    level: int = 0  # of these drafts, see `Acceptance`
    was_right: bool = True  # the first of them
    share_right: float = FIRST_SHARE  # running share of right drafts
    retry_at: int = 0  # number of tokens from which on a rest may end in order to draft for it

    def fill_in(self, row: Row) -> Row:
        """Return the row with its PENDING token filled in. A request that has meanwhile reached its length limit
        computes its last position again, with the same token."""
        if row.token_ids[0] != PENDING:
            return row
        start = min(len(self.token_ids), self.max_len) - 1
        token_id = max(self.token_ids[start], 0)  # the token is NO_TOKEN if the request has failed
        return replace(row, start=start, token_ids=[token_id, *row.token_ids[1:]])

    def note_drafts(self, drafts: Sequence[int], level: int) -> None:
        """Note drafts behind the known tokens, which `judge` compares with what follows."""
        self.drafts, self.drafted_at, self.level = drafts, len(self.token_ids), level

    def note_ability(self, is_able: bool) -> None:
        """Note whether the answer may be drafted for. It may not for example while a grammar is slow, while reading its
        tokens would cost too much, or if the hidden states are missing that an MTP layer reads."""
        in_answer = len(self.token_ids) > self.prompt_len
        self.retry_at = len(self.token_ids) + RETRY_AFTER if in_answer and not is_able else 0

    def judge(self, acceptance: Acceptance) -> None:
        """Compare the last drafts with the tokens that have followed, which are known even if no step has verified
        the drafts."""
        known = self.token_ids[self.drafted_at : self.drafted_at + len(self.drafts)]
        if known and self.drafts:
            num_right = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, self.drafts, strict=False))
            )
            self.drafts = ()
            self.record(acceptance, self.level, num_right, len(known))

    def record(self, acceptance: Acceptance, level: int, num_right: int, num_judged: int) -> None:
        """Note that of the drafts of a level so many were right, and that so many could be judged."""
        acceptance.record(level, num_right, num_judged)
        self.share_right += (num_right / num_judged - self.share_right) * (1 - SHARE_DECAY)
        self.was_right = num_right > 0
