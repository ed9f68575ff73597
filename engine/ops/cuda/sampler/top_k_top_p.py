"""Thresholds of top-k and top-p: the highest bound that leaves enough tokens, or enough of their weight, at or above
it.

The search has ROUNDS rounds of PIVOTS pivots, each between the bounds that the previous round has found. The first and
the last pivot of a round are the bounds themselves, so that count and weight above each are known part by part. The
candidates, which lie between the last bounds, are gathered, and one program for each row bisects among them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import kernel
from engine.ops.cuda.sampler.row import ALL, EVERYTHING, PART, Rows, largest_of, load, weights_of

PIVOTS, ROUNDS = 8, 4
MOST_CANDIDATES = 4096  # where more are left, of many that are equal, the whole row is bisected


def apply_threshold(rows: Rows, wanted: Tensor, *, by_count: bool) -> None:
    """Raise the floor of each row to its threshold. `wanted` is top_k (with `by_count`) or top_p of each row; rows that
    keep everything are not changed.
    """
    (num_rows, _), (vocab, num_parts, padded_parts), new = rows.logits.shape, rows.sizes, rows.logits.new_empty
    counts = new(num_rows, ROUNDS, num_parts, PIVOTS, dtype=torch.int32)
    sums = new(num_rows, ROUNDS, PIVOTS), counts, new(counts.shape)
    candidates = new(num_rows, MOST_CANDIDATES)
    kept = rows.floor, rows.count, rows.weight
    given = rows.logits, rows.temperature, rows.min_p, wanted, rows.most, *kept, *sums
    sizes = vocab, num_parts, by_count, padded_parts, PIVOTS, ROUNDS, PART
    for number in range(ROUNDS):
        _weigh_pivots[(num_rows, num_parts)](*given, *sizes, number)
    _gather[(num_rows, num_parts)](*given, candidates, *sizes, MOST_CANDIDATES)
    _bisect[(num_rows,)](*given, candidates, rows.spare, *sizes, MOST_CANDIDATES, num_warps=8)


@triton.jit
def _row_of(temperatures, wanted, most, num_parts, BY_COUNT: tl.constexpr, PARTS: tl.constexpr):
    """Return this program's row, its temperature, its top_k or top_p, its largest logit, and whether the row is cut at
    all.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, share = tl.load(temperatures + row), tl.load(wanted + row)
    largest = largest_of(most, row, num_parts, PARTS)
    is_wanted = (temperature > 0) & (share > 0 if BY_COUNT else share < 1) & (largest > -float("inf"))
    return row, temperature, share, largest, is_wanted


@triton.jit
def _bounds(
    row, wanted, floor, count, weight, pivots, counts, weights, num_parts,
    BY_COUNT: tl.constexpr, PARTS: tl.constexpr, PIVOTS: tl.constexpr, ROUNDS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Return the result of ROUND: the indexes of two pivots, all pivots with their counts and weights, and how much is
    enough.
    """
    number = tl.arange(0, PIVOTS)
    pivot, counted, weighed = _sums(
        row, floor, count, weight, pivots, counts, weights, num_parts, PARTS, PIVOTS, ROUNDS, ROUND
    )
    if BY_COUNT:
        enough = wanted.to(tl.float64)
        is_enough = counted >= enough
    else:
        _, _, of_first = _sums(row, floor, count, weight, pivots, counts, weights, num_parts, PARTS, PIVOTS, ROUNDS, 0)
        enough = wanted.to(tl.float64) * _at(of_first, number, 0)
        is_enough = weighed >= enough
    is_enough = (number == 0) | (is_enough & (number < PIVOTS - 1))
    low = tl.max(tl.where(is_enough, number, 0), 0)
    return low, low + 1, pivot, counted, weighed, enough


@triton.jit
def _sums(
    row, floor, count, weight, pivots, counts, weights, num_parts,
    PARTS: tl.constexpr, PIVOTS: tl.constexpr, ROUNDS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Return the pivots of a round, and count and weight of what is kept so far at or above each, f64."""
    number, part = tl.arange(0, PIVOTS), tl.arange(0, PARTS)
    pivot = tl.load(pivots + (row * ROUNDS + ROUND) * PIVOTS + number)
    at = ((row * ROUNDS + ROUND) * num_parts + part[:, None]) * PIVOTS + number[None, :]
    is_part = (part < num_parts)[:, None]
    counted = tl.sum(tl.load(counts + at, mask=is_part, other=0), 0).to(tl.float64)
    weighed = tl.sum(tl.load(weights + at, mask=is_part, other=0).to(tl.float64), 0)
    bound = tl.load(floor + row)
    is_all = pivot <= bound  # of those that equal it, only some are kept
    counted = tl.where(is_all, tl.load(count + row).to(tl.float64), counted)
    return pivot, counted, tl.where(is_all, tl.load(weight + row), weighed)


@triton.jit
def _at(values, number, index):
    return tl.sum(tl.where(number == index, values, 0), 0)


@kernel
def _weigh_pivots(
    logits, temperatures, min_ps, wanted, most, floor, count, weight, pivots, counts, weights,
    vocab, num_parts, BY_COUNT: tl.constexpr, PARTS: tl.constexpr, PIVOTS: tl.constexpr, ROUNDS: tl.constexpr,
    PART: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    row, temperature, share, largest, is_wanted = _row_of(temperatures, wanted, most, num_parts, BY_COUNT, PARTS)
    if is_wanted:
        number = tl.arange(0, PIVOTS)
        if ROUND == 0:
            # Nearer and nearer to the largest: a row may be flat or steep.
            low = tl.maximum(tl.load(floor + row), largest - EVERYTHING * temperature)
            high = largest + tl.abs(largest) * 1e-6 + 1e-30
            pivot = largest - (largest - low) * tl.exp2(-2.0 * number)
        else:
            first, last, before, _, _, _ = _bounds(
                row, share, floor, count, weight, pivots, counts, weights, num_parts,
                BY_COUNT, PARTS, PIVOTS, ROUNDS, ROUND - 1,
            )  # fmt: skip
            low, high = _at(before, number, first), _at(before, number, last)
            pivot = low + (high - low) * (number / (PIVOTS - 1))
        pivot = tl.where(number == 0, low, tl.where(number == PIVOTS - 1, high, pivot))
        _, values = load(logits + row * vocab, part * PART, vocab, PART)
        weighed = weights_of(values, largest, temperature, tl.load(min_ps + row))
        counted_all = tl.zeros([PIVOTS], tl.int32)
        weighed_all = tl.zeros([PIVOTS], tl.float32)
        for index in range(PIVOTS):
            is_in = (values >= _at(pivot, number, index)) & (weighed > 0)
            counted_all = tl.where(number == index, tl.sum(is_in.to(tl.int32), 0), counted_all)
            weighed_all = tl.where(number == index, tl.sum(tl.where(is_in, weighed, 0.0), 0), weighed_all)
        at = ((row * ROUNDS + ROUND) * num_parts + part) * PIVOTS + number
        tl.store(counts + at, counted_all)
        tl.store(weights + at, weighed_all)
        if part == 0:
            tl.store(pivots + (row * ROUNDS + ROUND) * PIVOTS + number, pivot)


@kernel
def _gather(
    logits, temperatures, min_ps, wanted, most, floor, count, weight, pivots, counts, weights, candidates,
    vocab, num_parts, BY_COUNT: tl.constexpr, PARTS: tl.constexpr, PIVOTS: tl.constexpr, ROUNDS: tl.constexpr,
    PART: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Append the candidates of one part to those of the parts before it."""
    part = tl.program_id(1)
    row, temperature, share, largest, is_wanted = _row_of(temperatures, wanted, most, num_parts, BY_COUNT, PARTS)
    if is_wanted:
        first, last, pivot, _, _, _ = _bounds(
            row, share, floor, count, weight, pivots, counts, weights, num_parts,
            BY_COUNT, PARTS, PIVOTS, ROUNDS, ROUNDS - 1,
        )  # fmt: skip
        number = tl.arange(0, PIVOTS)
        low, high = _at(pivot, number, first), _at(pivot, number, last)
        _, values = load(logits + row * vocab, part * PART, vocab, PART)
        has_weight = weights_of(values, largest, temperature, tl.load(min_ps + row)) > 0
        is_in = ((values >= low) & (values < high) & has_weight).to(tl.int32)
        place = _num_between(row, part, first, last, counts, num_parts, PARTS, PIVOTS, ROUNDS) + tl.cumsum(is_in, 0) - 1
        tl.store(candidates + row * MOST + place, values, mask=(is_in == 1) & (place < MOST))


@triton.jit
def _num_between(
    row, end, first, last, counts, num_parts, PARTS: tl.constexpr, PIVOTS: tl.constexpr, ROUNDS: tl.constexpr
):  # fmt: skip
    """Return the number of logits of the parts before `end` that lie between two pivots of the last round."""
    part = tl.arange(0, PARTS)
    at = counts + ((row * ROUNDS + ROUNDS - 1) * num_parts + part) * PIVOTS
    is_before = part < end
    return tl.sum(tl.load(at + first, mask=is_before, other=0) - tl.load(at + last, mask=is_before, other=0), 0)


@kernel
def _bisect(
    logits, temperatures, min_ps, wanted, most, floor, count, weight, pivots, counts, weights, candidates, spare,
    vocab, num_parts, BY_COUNT: tl.constexpr, PARTS: tl.constexpr, PIVOTS: tl.constexpr, ROUNDS: tl.constexpr,
    PART: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Bisect among the candidates. If one token is left between the bounds, any bound between them will do; several
    equal ones are kept at `low`.
    """
    row, temperature, share, largest, is_wanted = _row_of(temperatures, wanted, most, num_parts, BY_COUNT, PARTS)
    if is_wanted:
        first, last, pivot, counted, weighed, enough = _bounds(
            row, share, floor, count, weight, pivots, counts, weights, num_parts,
            BY_COUNT, PARTS, PIVOTS, ROUNDS, ROUNDS - 1,
        )  # fmt: skip
        number = tl.arange(0, PIVOTS)
        low, high = _at(pivot, number, first), _at(pivot, number, last)
        count_low, count_high = _at(counted, number, first), _at(counted, number, last)
        weight_low, weight_high = _at(weighed, number, first), _at(weighed, number, last)
        min_p = tl.load(min_ps + row)
        num_candidates = _num_between(row, num_parts, first, last, counts, num_parts, PARTS, PIVOTS, ROUNDS)
        place = tl.arange(0, MOST)
        values = tl.load(candidates + row * MOST + place, mask=place < num_candidates, other=-float("inf"))
        count_above, weight_above = count_high, weight_high  # of all candidates
        middle = low + (high - low) / 2
        while (count_low - count_high > 1) & (low < middle) & (middle < high):
            if num_candidates <= MOST:
                here, weight_here = _above(values, middle, largest, temperature, min_p)
                here += count_above
                weight_here += weight_above
            else:
                here, weight_here = _above_of_row(
                    logits + row * vocab, vocab, middle, largest, temperature, min_p, PART
                )
            is_enough = (here if BY_COUNT else weight_here) >= enough
            low = tl.where(is_enough, middle, low)
            count_low = tl.where(is_enough, here, count_low)
            weight_low = tl.where(is_enough, weight_here, weight_low)
            high = tl.where(is_enough, high, middle)
            count_high = tl.where(is_enough, count_high, here)
            weight_high = tl.where(is_enough, weight_high, weight_here)
            middle = low + (high - low) / 2
        num_equal = tl.maximum(count_low - count_high, 1)
        each = weights_of(low, largest, temperature, 0.0).to(tl.float64)
        needed = enough - count_high if BY_COUNT else tl.ceil((enough - weight_high) / each)
        needed = tl.minimum(tl.maximum(needed, 1), num_equal)
        tl.store(floor + row, low)
        tl.store(spare + row, tl.where(needed < num_equal, needed, ALL).to(tl.int32))
        tl.store(count + row, (count_high + needed).to(tl.int32))
        tl.store(weight + row, tl.where(num_equal > 1, weight_high + needed * each, weight_low))


@triton.jit
def _above(values, bound, largest, temperature, min_p):
    """Return the number of tokens with weight whose logit is at least `bound`, and their weight, f64."""
    weights = weights_of(values, largest, temperature, min_p)
    is_in = (values >= bound) & (weights > 0)
    return tl.sum(is_in.to(tl.int32), 0).to(tl.float64), tl.sum(tl.where(is_in, weights, 0.0).to(tl.float64), 0)


@triton.jit
def _above_of_row(x, vocab, bound, largest, temperature, min_p, BLOCK: tl.constexpr):
    count = tl.zeros([], tl.float64)
    weight = tl.zeros([], tl.float64)
    for start in range(0, vocab, BLOCK):
        _, values = load(x, start, vocab, BLOCK)
        count_here, weight_here = _above(values, bound, largest, temperature, min_p)
        count += count_here
        weight += weight_here
    return count, weight
