"""Rows of a step that verifies drafts, behind which the draft model may run before their tokens are known. It handles
tokens and slots, and is independent of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.core.types import PENDING, Batch, Row
from engine.executors.speculation.requests import DraftedRequest


class RunningStep(NamedTuple):
    """A step that was launched, without a mask."""

    rows: Sequence[Row]
    hidden_states: Any  # see `Proposer.hidden_states`


class VerifiedRow(NamedTuple):
    """A row of a step: one known token and the drafts behind it."""

    first_choice: int  # its place among the tokens of the step, behind each of which one is chosen
    num_drafts: int
    draft_row: int  # its place among the rows of the run that has made the drafts


def verified_rows(
    rows: Sequence[Row], requests: Mapping[int, DraftedRequest], draft_rows: Mapping[int, int]
) -> dict[int, VerifiedRow]:
    """Return the rows of a step by slot, nothing if some of them are of a prompt, have forks, compute a token again or
    have drafts of another run. `draft_rows` are the places of slots in the run of the draft model before the step."""
    verified: dict[int, VerifiedRow] = {}
    num_tokens = 0
    for row in rows:
        is_next = row.start == len(requests[row.slot].token_ids) - 1
        if len(row.token_ids) != row.num_sampled or row.forks or not is_next:
            return {}
        if row.num_sampled > 1 and row.slot not in draft_rows:
            return {}
        verified[row.slot] = VerifiedRow(num_tokens, row.num_sampled - 1, draft_rows.get(row.slot, 0))
        num_tokens += row.num_sampled
    return verified


def only_continues(batch: Batch, verified: Mapping[int, VerifiedRow]) -> bool:
    """Return whether the step of `batch` computes nothing but the last tokens of verified rows."""
    if batch.arrivals or batch.copies or batch.swaps or batch.has_mask:
        return False
    return all(row.token_ids[0] == PENDING and not row.forks and row.slot in verified for row in batch.rows)
