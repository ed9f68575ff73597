"""Tokens that a draft model samples, which become the inputs of its next step without the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, kernel, next_power_of_2, wait_for_inputs


class DraftedTokens:
    """Tokens that a draft model has sampled since the beginning of a run, and its next inputs. Owns their memory.

    `memory` i32 [drafts * rows] receives the tokens of a run. `chosen` i32 has the tokens that the last step of the
    target model has sampled, one behind each draft and one more for each row. `draft_ids` are the tokens of the target
    model for those of the draft model, i32; None: they are the same.
    """

    def __init__(self, max_rows: int, memory: Tensor, chosen: Tensor, draft_ids: Tensor | None = None):
        device = memory.device
        self._chosen, self._draft_ids = chosen, draft_ids
        self._counts = torch.zeros(2, dtype=torch.int32, device=device)  # the first one: steps since the beginning
        self.drafts = memory.view(-1, max_rows)  # by step and row
        self.token_ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def verify(self, verified: Tensor, inputs: Mapping[str, Tensor], counters: Tensor) -> None:
        """Complete the inputs of a run that was launched behind the step that verifies the drafts of the run before.

        `verified` i32 [3, S] has, for each row, the place of its first token in `chosen`, the number of its drafts in
        that step, and its row in the run before; -1: nothing is missing. The row gets the tokens that were chosen
        there. Those up to the first wrong draft belong to the answer: its place in `logit_rows` and its counter move on
        by the number of right drafts. What the draft model computes behind that place is never read.
        """
        count = len(counters)
        _verify[(1,)](
            verified, self._chosen, self.drafts, inputs["token_ids"], inputs["query_starts"], inputs["logit_rows"],
            counters, count, self.drafts.stride(0), len(self.drafts), next_power_of_2(max(count, 16)),
            num_warps=1, **PDL,
        )  # fmt: skip

    def begin(self, positions: Tensor) -> None:
        """Begin with no tokens behind these positions, i32 [S]."""
        self._counts.zero_()
        self.positions[: len(positions)].copy_(positions)

    def add(self, token_ids: Tensor, counters: Tensor) -> None:
        """Add a token for each row, i32 [S]. The `counters` of the random numbers, i64 [S], and the positions move on
        by one."""
        ids, count = self._draft_ids, len(token_ids)
        _add[(1,)](
            token_ids, token_ids if ids is None else ids, counters, self.positions, self.token_ids, self.drafts,
            self._counts, count, 0 if ids is None else len(ids), self.drafts.stride(0), len(self.drafts),
            next_power_of_2(max(count, 16)), num_warps=1, **PDL,
        )  # fmt: skip


@kernel
def _verify(
    verified, chosen, drafts, token_ids, query_starts, rows, counters, count, stride, max_drafts, BLOCK: tl.constexpr,
):  # fmt: skip
    begin_next()
    wait_for_inputs()
    row = tl.arange(0, BLOCK)
    is_in = row < count
    first = tl.load(verified + row, mask=is_in, other=-1)
    num_drafts = tl.load(verified + count + row, mask=is_in, other=-1)
    before = tl.load(verified + 2 * count + row, mask=is_in, other=0)
    start = tl.load(query_starts + row, mask=is_in, other=0)
    is_right, num_right = first >= 0, tl.zeros((BLOCK,), tl.int32)
    for position in range(0, max_drafts + 1):
        is_there = (first >= 0) & (position <= num_drafts)
        token_id = tl.load(chosen + first + position, mask=is_there, other=0)
        tl.store(token_ids + start + position, token_id, mask=is_there)
        is_draft = is_there & (position < num_drafts)
        draft = tl.load(drafts + position * stride + before, mask=is_draft, other=-1)
        is_right = is_right & is_draft & (token_id == draft)
        num_right += is_right.to(tl.int32)
    tl.store(rows + row, tl.load(rows + row, mask=is_in, other=0) + num_right, mask=is_in)
    tl.store(counters + row, tl.load(counters + row, mask=is_in, other=0) + num_right, mask=is_in)


@kernel
def _add(
    token_ids, draft_ids, counters, positions, next_ids, drafts, counts, count, num_ids, stride, max_drafts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    begin_next()
    wait_for_inputs()
    row = tl.arange(0, BLOCK)
    is_in = row < count
    step = tl.load(counts)
    ids = tl.load(token_ids + row, mask=is_in, other=0)
    mapped = tl.load(draft_ids + ids, mask=is_in & (ids >= 0) & (ids < num_ids), other=-1)
    ids = tl.where(num_ids > 0, mapped, ids)
    tl.store(next_ids + row, ids, mask=is_in)
    tl.store(drafts + step * stride + row, ids, mask=is_in & (step < max_drafts))
    tl.store(positions + row, tl.load(positions + row, mask=is_in, other=0) + 1, mask=is_in)
    tl.store(counters + row, tl.load(counters + row, mask=is_in, other=0) + 1, mask=is_in)
    tl.store(counts, step + 1)
