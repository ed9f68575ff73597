"""Merging of the partial results of attention that several programs compute for one query: the sums over values, and
the largest score and the total weight that they are relative to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.launch import begin_next, kernel, wait_for_inputs


@triton.jit
def window_start(position, WINDOW: tl.constexpr):
    """Return the first position that a query at `position` attends to."""
    return tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0


@kernel
def combine(
    partial, out, num_heads, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one head of one token. Each split has sums, the largest score and the total weight relative
    to it.
    """
    begin_next()
    wait_for_inputs()
    head = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    split = tl.arange(0, PADDED_SPLITS)
    d = tl.arange(0, PADDED_DIM)
    rows = partial + (head * SPLITS + split) * (HEAD_DIM + 2)
    is_split = split < SPLITS
    m = tl.load(rows + HEAD_DIM, mask=is_split, other=-float("inf"))
    factor = tl.exp2(m - tl.max(m, 0))
    total = tl.sum(tl.load(rows + HEAD_DIM + 1, mask=is_split, other=0) * factor, 0)
    is_in = is_split[:, None] & (d < HEAD_DIM)[None, :]
    sums = tl.load(rows[:, None] + d[None, :], mask=is_in, other=0)
    tl.store(out + head * HEAD_DIM + d, tl.sum(sums * factor[:, None], 0) / total, mask=d < HEAD_DIM)


@kernel
def merge_units(
    partial, context_lens, sinks, out, num_heads, num_units_of_table,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one head of the single token of a request."""
    begin_next()
    wait_for_inputs()
    head = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    d = tl.arange(0, PADDED_DIM)[None, :]
    one = tl.zeros([1], tl.int32)
    all_m = tl.full([1], -float("inf"), tl.float32)
    all_total = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        all_m = tl.load(sinks + tl.program_id(1) + one).to(tl.float32) * 1.4426950408889634
        all_total += 1
    all_sums = tl.zeros([1, PADDED_DIM], tl.float32)
    position = tl.load(context_lens + tl.program_id(0))
    for unit in range(window_start(position, WINDOW) // UNIT, position // UNIT + 1):
        at = partial + (head * num_units_of_table + unit) * (HEAD_DIM + 2)
        sums = tl.load(at + d, mask=d < HEAD_DIM, other=0)
        m, total = tl.load(at + HEAD_DIM + one), tl.load(at + HEAD_DIM + 1 + one)
        all_m, all_total, all_sums = merge_unit(all_m, all_total, all_sums, m, total, sums)
    tl.store(out + head * HEAD_DIM + d, all_sums / all_total[:, None], mask=d < HEAD_DIM)


@triton.jit
def merge_unit(all_m, all_total, all_sums, m, total, sums):
    """Merge one more unit into the running results: for each row its largest score, and the total weight and the sums
    relative to it.
    """
    largest = tl.maximum(all_m, m)
    floor = tl.where(largest == -float("inf"), 0.0, largest)  # of a row that has seen nothing yet
    before, here = tl.exp2(all_m - floor), tl.exp2(m - floor)
    # Written out, for a compiler could choose either product to be the one that is not rounded.
    all_total = tl.fma(all_total, before, total * here)
    all_sums = tl.fma(all_sums, tl.broadcast_to(before[:, None], sums.shape), sums * here[:, None])
    return largest, all_total, all_sums
