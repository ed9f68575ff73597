"""Routing of tokens to experts: scores and the choice of experts in float32, and the order of slots by expert.

A slot is a pair of a token and one of its experts, numbered `token * top_k + rank`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, kernel, wait_for_inputs

ROW_TILE = 4, 512  # experts and inputs of a program that makes logits of one token
FEW = 32  # tokens up to which every token has programs of its own
DOT_TILES = {1024: (16, 16, 128)}  # by the most tokens: tokens, experts and inputs of a program for more
LARGEST_TILE = 64, 64, 32
SORTED = 4096  # slots; more are sorted by torch
QUERIES, CHUNK = 16, 256  # slots of a program that sorts, and those that it compares them with at a time


class Order(NamedTuple):
    """Slots by expert."""

    slots: Tensor  # i32 [T * top_k]
    starts: Tensor  # i32 [E + 1]: the first slot of each expert in `slots`


def moe_route(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, choice_bias: Tensor | None = None, **attributes: Any
) -> tuple[Tensor, Tensor]:
    """Return the experts i32 [T, top_k] of the rows of x [T, H], and their weights f32."""
    return route(x, weight, bias, choice_bias, is_few=len(x) <= FEW, **attributes)


def invariant_moe_route(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, choice_bias: Tensor | None = None, **attributes: Any
) -> tuple[Tensor, Tensor]:
    """Route with one order of sums for all numbers of tokens."""
    return route(x, weight, bias, choice_bias, is_few=False, **attributes)


def route(  # noqa: PLR0913 - the attributes of the catalogue
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    choice_bias: Tensor | None,
    *,
    is_few: bool,
    top_k: int,
    scoring: int,
    num_groups: int,
    top_groups: int,
    group_best: int,
    renormalize: int,
    epsilon: float,
    minimum: float,
    factor: float,
) -> tuple[Tensor, Tensor]:
    num_rows, num_experts = len(x), len(weight)
    ids = x.new_empty(num_rows, top_k, dtype=torch.int32)
    weights = x.new_empty(num_rows, top_k, dtype=torch.float32)
    if num_rows:
        logits = _logits(x, weight, bias, is_few=is_few)
        _choose[(num_rows,)](
            logits, logits if choice_bias is None else choice_bias, ids, weights, epsilon, minimum, factor,
            num_experts, triton.next_power_of_2(num_experts), top_k, triton.next_power_of_2(top_k), scoring,
            num_groups, triton.next_power_of_2(num_groups), top_groups, group_best, bool(renormalize),
            choice_bias is not None, num_warps=1, **PDL,
        )  # fmt: skip
    return ids, weights


def order_of(topk_ids: Tensor, num_experts: int) -> Order:
    """Return the slots by expert. The tensor of ids remembers them for the ops after the first."""
    known = getattr(topk_ids, "order", None)
    if known is None:
        known = _sorted(topk_ids.view(-1), num_experts)
        setattr(topk_ids, "order", known)  # noqa: B010 - Tensor declares no such attribute
    return known


def add_gated(x: Tensor, y: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """Return x + y * sigmoid(hidden · weight) of [T, N], [T, N], [T, K] and [K]."""
    out, (num_rows, width) = torch.empty_like(x), x.shape
    if num_rows:
        block = triton.next_power_of_2(max(width, hidden.shape[1]))
        _add_gated[(num_rows,)](x, y, hidden, weight, out, width, hidden.shape[1], block, num_warps=8, **PDL)
    return out


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_few: bool) -> Tensor:
    """Return float32 [T, E]."""
    (num_rows, width), num_experts = x.shape, len(weight)
    out = x.new_empty(num_rows, num_experts, dtype=torch.float32)
    given = x, weight, weight if bias is None else bias, out
    if is_few:
        experts, depth = ROW_TILE
        _row_logits[(num_rows, triton.cdiv(num_experts, experts))](
            *given, num_experts, width, bias is not None, experts, depth, num_warps=4, **PDL
        )
    else:
        rows, experts, depth = next((tile for most, tile in DOT_TILES.items() if num_rows <= most), LARGEST_TILE)
        _dot_logits[(triton.cdiv(num_rows, rows), triton.cdiv(num_experts, experts))](
            *given, num_rows, num_experts, width, bias is not None, rows, experts, depth, num_warps=4, **PDL
        )
    return out


def _sorted(ids: Tensor, num_experts: int) -> Order:
    count = len(ids)
    if count > SORTED:
        values, slots = ids.sort(stable=True)
        experts = torch.arange(num_experts + 1, device=ids.device, dtype=torch.int32)
        return Order(slots.int(), torch.searchsorted(values, experts, out_int32=True))
    slots, starts = torch.empty_like(ids), ids.new_empty(num_experts + 1)
    num_programs = triton.cdiv(count + num_experts + 1, QUERIES)
    _sort[(num_programs,)](ids, slots, starts, count, num_experts, QUERIES, CHUNK, num_warps=4, **PDL)
    return Order(slots, starts)


@kernel
def _row_logits(
    x, weight, bias, out, num_experts, width, HAS_BIAS: tl.constexpr, EXPERTS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Compute the router's logits of one token."""
    begin_next()
    row = tl.program_id(0).to(tl.int64)
    n, k = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS), tl.arange(0, DEPTH)
    at = weight + tl.minimum(n, num_experts - 1)[:, None] * width + k[None, :]
    ahead = tl.load(at, mask=(k < width)[None, :], other=0)  # a round ahead, the first before the inputs are there
    wait_for_inputs()
    sums = tl.zeros([EXPERTS, DEPTH], tl.float32)
    for start in range(0, width, DEPTH):
        own = ahead
        following = start + DEPTH
        ahead = tl.load(at + following, mask=(following + k < width)[None, :], other=0)
        values = tl.load(x + row * width + start + k, mask=start + k < width, other=0).to(tl.float32)
        sums += own.to(tl.float32) * values[None, :]
    logits = tl.sum(sums, 1)
    if HAS_BIAS:
        logits += tl.load(bias + n, mask=n < num_experts, other=0).to(tl.float32)
    tl.store(out + row * num_experts + n, logits, mask=n < num_experts)


@kernel
def _dot_logits(
    x, weight, bias, out, num_rows, num_experts, width, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    begin_next()
    wait_for_inputs()
    m, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    k = tl.arange(0, DEPTH)
    at_row = x + tl.minimum(m, num_rows - 1).to(tl.int64)[:, None] * width + k[None, :]
    at_expert = weight + tl.minimum(n, num_experts - 1)[:, None] * width + k[None, :]
    sums = tl.zeros([ROWS, EXPERTS], tl.float32)
    for start in range(0, width, DEPTH):
        is_in = (start + k < width)[None, :]
        rows = tl.load(at_row + start, mask=is_in, other=0).to(tl.float32)
        experts = tl.load(at_expert + start, mask=is_in, other=0).to(tl.float32)
        sums = tl.dot(rows, tl.trans(experts), sums, input_precision="tf32x3")
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < num_experts, other=0).to(tl.float32)[None, :]
    is_out = (m < num_rows)[:, None] & (n < num_experts)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * num_experts + n[None, :], sums, mask=is_out)


@kernel
def _choose(
    logits, choice_bias, ids, weights, epsilon, minimum, factor,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, SCORING: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    RENORMALIZE: tl.constexpr, HAS_CHOICE_BIAS: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token. EXPERTS, SLOTS, GROUPS: the numbers of them rounded up to powers of two."""
    begin_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    e, j = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    is_expert = e < NUM_EXPERTS
    scores = tl.load(logits + row * NUM_EXPERTS + e, mask=is_expert, other=-float("inf"))
    if SCORING == 0:
        powers = tl.exp(scores - tl.max(scores, 0))
        scores = powers / tl.sum(powers, 0)
    elif SCORING == 1:
        scores = 1 / (1 + tl.exp(-scores))
    choice = scores
    if HAS_CHOICE_BIAS:
        choice += tl.load(choice_bias + e, mask=is_expert, other=0).to(tl.float32)
    choice = tl.where(choice == choice, choice, -float("inf"))
    if NUM_GROUPS > 1:
        choice = _of_best_groups(
            choice, is_expert, NUM_EXPERTS // NUM_GROUPS, NUM_GROUPS, GROUPS, TOP_GROUPS, GROUP_BEST
        )
    chosen = tl.zeros([SLOTS], tl.float32)
    chosen_ids = tl.zeros([SLOTS], tl.int32)
    is_left = is_expert
    for slot in tl.static_range(TOP_K):
        best = _first_largest(choice, is_left, e, EXPERTS)
        is_left = is_left & (e != best)
        chosen_ids = tl.where(j == slot, best, chosen_ids)
        chosen = tl.where(j == slot, tl.sum(tl.where(e == best, scores, 0.0), 0), chosen)
    if SCORING == 2:
        powers = tl.where(j < TOP_K, tl.exp(chosen - tl.max(tl.where(j < TOP_K, chosen, -float("inf")), 0)), 0.0)
        chosen = powers / tl.sum(powers, 0)
    if RENORMALIZE:
        chosen = chosen / tl.maximum(tl.sum(chosen, 0) + epsilon, minimum)
    at = row * TOP_K + j
    tl.store(ids + at, chosen_ids, mask=j < TOP_K)
    tl.store(weights + at, chosen * factor, mask=j < TOP_K)


@triton.jit
def _first_largest(values, is_left, index, COUNT: tl.constexpr):
    """Return the index of the largest value that is left, of equal ones the lowest."""
    left = tl.where(is_left, values, -float("inf"))
    return tl.min(tl.where(is_left & (left == tl.max(left, 0)), index, COUNT), 0)


@triton.jit
def _of_best_groups(
    choice, is_expert, SIZE: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):  # fmt: skip
    """Return the choice with the experts of other groups at -inf."""
    e, g = tl.arange(0, choice.shape[0]), tl.arange(0, GROUPS)
    group = e // SIZE
    totals = tl.zeros([GROUPS], tl.float32)
    for each in tl.static_range(NUM_GROUPS):
        is_left = is_expert & (group == each)
        total = 0.0
        for _ in tl.static_range(GROUP_BEST):
            best = _first_largest(choice, is_left, e, choice.shape[0])
            is_left = is_left & (e != best)
            total += tl.max(tl.where(e == best, choice, -float("inf")), 0)
        totals = tl.where(g == each, total, totals)
    totals = tl.where(totals == totals, totals, -float("inf"))
    is_left, is_kept = g < NUM_GROUPS, is_expert & (e < 0)
    for _ in tl.static_range(TOP_GROUPS):
        best = _first_largest(totals, is_left, g, GROUPS)
        is_left = is_left & (g != best)
        is_kept = is_kept | (group == best)
    return tl.where(is_kept, choice, -float("inf"))


@kernel
def _sort(ids, slots, starts, count, num_experts, QUERIES: tl.constexpr, CHUNK: tl.constexpr):
    """Count, for each slot or expert of this program, the slots that come before it."""
    begin_next()
    wait_for_inputs()
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    is_slot, expert = query < count, query - count
    own = tl.load(ids + query, mask=is_slot, other=0)
    value = tl.where(is_slot, own, expert)
    place = tl.zeros([QUERIES], tl.int32)
    for start in range(0, count, CHUNK):
        other = start + tl.arange(0, CHUNK)
        others = tl.load(ids + other, mask=other < count, other=2147483647)[None, :]
        is_equal = (others == value[:, None]) & (other[None, :] < query[:, None]) & is_slot[:, None]
        place += tl.sum(((others < value[:, None]) | is_equal).to(tl.int32), 1)
    tl.store(slots + place, query, mask=is_slot)
    tl.store(starts + expert, place, mask=(expert >= 0) & (expert <= num_experts))


@kernel
def _add_gated(x, y, hidden, weight, out, width, hidden_width, BLOCK: tl.constexpr):
    begin_next()
    wait_for_inputs()
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    values = tl.load(hidden + row * hidden_width + k, mask=k < hidden_width, other=0).to(tl.float32)
    gate = tl.sum(values * tl.load(weight + k, mask=k < hidden_width, other=0).to(tl.float32), 0)
    at, is_in = row * width + k, k < width
    own, added = (
        tl.load(x + at, mask=is_in, other=0).to(tl.float32),
        tl.load(y + at, mask=is_in, other=0).to(tl.float32),
    )
    tl.store(out + at, own + added / (1 + tl.exp(-gate)), mask=is_in)
