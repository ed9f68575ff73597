"""Division of the contexts of a decode step into pieces of equal length, so that a long one among short ones has more
programs. It is computed on the device, because the grid of a captured step follows from shapes alone.

The division is an i32 array: the tiles of a piece; for each program its request and the number of its piece there (in
the upper 16 bits), or -1 for none; and for each request the program that has its first piece, and their number.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from engine.ops.cuda import forward_context
from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, new_indices, next_power_of_2, wait_for_inputs
from engine.ops.cuda.split_kv import window_start

MAX_PIECES = 64  # of a request
MAX_REQUESTS = 128  # with more of them, a long context is a small part of a step
PROGRAMS_PER_BLOCK = 32  # programs whose pieces one program of `_divide` finds
PIECES_PER_BLOCK = 8  # pieces that one program of `_combine` reads at a time


def divide(context_lens: Tensor, num_programs: int, tile: int, window: int) -> Tensor:
    """Return the division of contexts of these lengths, and the new position of each, among `num_programs` programs, at
    least one for each request. It is computed once in a forward pass."""
    divisions = forward_context.current().divisions
    known = divisions.get((num_programs, tile, window))
    if known is None or known[0] is not context_lens:
        count = len(context_lens)
        division = new_indices(context_lens, num_programs + count + 2)
        grid = (cdiv(num_programs, PROGRAMS_PER_BLOCK),)
        _divide[grid](
            context_lens, division, count, num_programs, MAX_PIECES, window, tile, MAX_REQUESTS, PROGRAMS_PER_BLOCK,
            num_warps=4, **PDL,
        )  # fmt: skip
        known = divisions[num_programs, tile, window] = context_lens, division
    return known[1]


def combine(partial: Tensor, division: Tensor, out: Tensor, num_requests: int, num_programs: int) -> None:
    """Combine the pieces of requests that have several, `partial` f32 [P, Hq, D + 2], in `out` [B, Hq D]."""
    num_heads, head_dim = partial.shape[1], partial.shape[2] - 2
    padded = next_power_of_2(head_dim)
    _combine[(num_requests, num_heads)](
        partial, division, out, num_requests, num_programs, num_heads, head_dim, padded, PIECES_PER_BLOCK,
        num_warps=2, **PDL,
    )  # fmt: skip


@kernel
def _divide(
    context_lens, division, num_requests, num_programs, max_pieces,
    WINDOW: tl.constexpr, TILE: tl.constexpr, REQUESTS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Find the shortest pieces of which there are no more than programs, and write them for PROGRAMS programs."""
    begin_next()
    wait_for_inputs()
    r, p = tl.arange(0, REQUESTS), tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    position = tl.load(context_lens + r, mask=r < num_requests, other=0)
    tiles = tl.where(r < num_requests, position // TILE + 1 - window_start(position, WINDOW) // TILE, 0)
    high = tl.max(tiles, 0)
    low = tl.cdiv(high, max_pieces)
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum(tl.cdiv(tiles, middle), 0) <= num_programs
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    counts = tl.cdiv(tiles, low)
    ends, total = tl.cumsum(counts, 0), tl.sum(counts, 0)
    is_before = (ends[None, :] <= p[:, None]).to(tl.int32)
    request, first = tl.sum(is_before, 1), tl.sum(is_before * counts[None, :], 1)
    piece = tl.where(p < total, request | ((p - first) << 16), -1)
    tl.store(division + 1 + p, piece, mask=p < num_programs)
    if tl.program_id(0) == 0:
        tl.store(division, low)
        tl.store(division + 1 + num_programs + r, ends - counts, mask=r < num_requests)
        tl.store(division + 1 + num_programs + num_requests, total)


@kernel
def _combine(
    partial, division, out, num_requests, num_programs, num_heads,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Combine the pieces of one head of a request, PIECES at a time, if there are several."""
    begin_next()
    wait_for_inputs()
    request, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(division + 1 + num_programs + request)
    end = tl.load(division + 2 + num_programs + request)
    if end > first + 1:
        i, d = tl.arange(0, PIECES), tl.arange(0, PADDED_DIM)
        largest, total = -float("inf"), 0.0
        sums = tl.zeros([PADDED_DIM], tl.float32)
        for start in range(first, end, PIECES):
            is_piece = start + i < end
            at = partial + ((start + i) * num_heads + head) * (HEAD_DIM + 2)
            m = tl.load(at + HEAD_DIM, mask=is_piece, other=-float("inf"))
            totals = tl.load(at + HEAD_DIM + 1, mask=is_piece, other=0)
            own = tl.load(at[:, None] + d[None, :], mask=is_piece[:, None] & (d < HEAD_DIM)[None, :], other=0)
            before, largest = largest, tl.maximum(largest, tl.max(m, 0))
            factor, factors = tl.exp2(before - largest), tl.exp2(m - largest)
            total = total * factor + tl.sum(totals * factors, 0)
            sums = sums * factor + tl.sum(own * factors[:, None], 0)
        row = request.to(tl.int64) * num_heads + head
        tl.store(out + row * HEAD_DIM + d, sums / total, mask=d < HEAD_DIM)
