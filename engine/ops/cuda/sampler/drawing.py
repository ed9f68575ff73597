"""Choice of one of the tokens that are kept of each row: the likeliest one, or one by a uniform random number."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import kernel
from engine.ops.cuda.sampler.row import PART, Rows, largest_of, load, weights_of


def draw(rows: Rows, sent: Mapping[str, Tensor], *, some_drawn: bool) -> Tensor:
    """Return the sampled tokens i32 [S], -1 where no token is left. Without `some_drawn` every row is greedy."""
    (num_rows, _), (vocab, num_parts, padded_parts) = rows.logits.shape, rows.sizes
    given = rows.logits, rows.temperature, rows.min_p, rows.most, rows.floor
    parts = torch.empty_like(rows.most, dtype=torch.float64), torch.empty_like(rows.most_ids)
    if some_drawn:
        _weigh[(num_rows, num_parts)](*given, *parts, vocab, num_parts, padded_parts, PART)
    token_ids = rows.most_ids.new_empty(num_rows)
    _choose[(num_rows,)](
        *given, *parts, rows.most_ids, rows.spare, sent["seed"], sent["counter"], token_ids,
        vocab, num_parts, padded_parts, PART, num_warps=8,
    )  # fmt: skip
    return token_ids


@kernel
def _weigh(
    logits, temperatures, min_ps, most, floor, above, equal, vocab, num_parts,
    PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Compute, for one part, the weight above the floor, and how many tokens equal it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, bound = tl.load(temperatures + row), tl.load(floor + row)
    if temperature > 0:
        largest = largest_of(most, row, num_parts, PARTS)
        _, values = load(logits + row * vocab, part * PART, vocab, PART)
        weights = weights_of(values, largest, temperature, tl.load(min_ps + row))
        at = row * num_parts + part
        tl.store(above + at, tl.sum(tl.where(values > bound, weights, 0.0).to(tl.float64), 0))
        tl.store(equal + at, tl.sum(((values == bound) & (weights > 0)).to(tl.int32), 0))


@kernel
def _choose(
    logits, temperatures, min_ps, most, floor, above, equal, most_ids, spare, seeds, counters, token_ids,
    vocab, num_parts, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    is_part, at = part < num_parts, row * num_parts + part
    mosts = tl.load(most + at, mask=is_part, other=-float("inf"))
    largest = tl.max(mosts, 0)
    temperature = tl.load(temperatures + row)
    if largest == -float("inf"):
        token_id = -1
    elif temperature == 0:
        token_id = tl.min(tl.where(mosts == largest, tl.load(most_ids + at, mask=is_part, other=vocab), vocab), 0)
    else:
        bound, min_p = tl.load(floor + row), tl.load(min_ps + row)
        num_equal = tl.load(equal + at, mask=is_part, other=0)
        before = tl.cumsum(num_equal, 0) - num_equal
        num_kept = tl.minimum(tl.maximum(tl.load(spare + row) - before, 0), num_equal)
        each = tl.where(bound > -float("inf"), weights_of(bound, largest, temperature, min_p), 0.0)
        weights = tl.load(above + at, mask=is_part, other=0) + num_kept * each.to(tl.float64)
        running = tl.cumsum(weights, 0)
        target = uniforms(tl.load(seeds + row), tl.load(counters + row))[0] * tl.sum(weights, 0)
        # The first kept token, by id, with which the running sum exceeds the target: its part, then itself.
        chosen = _first(running > target, weights > 0, part, PARTS)
        reached = tl.sum(tl.where(part == chosen, running - weights, 0), 0)
        kept = tl.sum(tl.where(part == chosen, num_kept, 0), 0)
        ids, values = load(logits + row * vocab, chosen * PART, vocab, PART)
        is_equal = values == bound
        is_kept = (values > bound) | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= kept))
        of_ids = tl.where(is_kept, weights_of(values, largest, temperature, min_p), 0.0).to(tl.float64)
        token_id = _first(reached + tl.cumsum(of_ids, 0) > target, of_ids > 0, ids, vocab)
    tl.store(token_ids + row, token_id)


@triton.jit
def _first(exceeds, has_weight, ids, none):
    """Return the lowest of the ids that exceed. Rounding may leave none; then return the last one with weight."""
    first = tl.min(tl.where(exceeds & has_weight, ids, none), 0)
    return tl.minimum(first, tl.max(tl.where(has_weight, ids, -1), 0))


@triton.jit
def uniforms(seed, counter):
    """Return two numbers in [0, 1), which are 53 bits each of Philox4x32-10 (Salmon et al., 2011)."""
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    first, second, third, fourth = tl.philox(seed, low, high, 0, 0)
    return _number(first, second), _number(third, fourth)


@triton.jit
def _number(high, low):
    bits = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11
    return bits.to(tl.float64) * (1.0 / 9007199254740992)
