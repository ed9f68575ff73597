"""Routing of tokens to experts: scores and the choice of experts in float32, and the order of slots by expert.

A slot is a pair of a token and one of its experts, numbered `token * top_k + rank`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda import forward_context
from engine.ops.cuda.forward_context import Order
from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, new_indices, next_power_of_2, wait_for_inputs

CHUNK, DEPTH = 256, 64  # inputs whose products are added up first, and of them those of a step
SMALL, LARGE = 64, 1024  # tokens, of which a program has 16, or 32 and one chunk, or 32 and all chunks
COMPARED = 1024  # slots that a program that sorts reads at a time
NONE_LEFT = tl.constexpr(-(2**31))


def moe_route(  # noqa: PLR0913 - the inputs and attributes of the catalogue
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    choice_bias: Tensor | None = None,
    num_real: Tensor | None = None,
    *,
    top_k: int,
    scoring: int,
    num_groups: int,
    top_groups: int,
    group_best: int,
    renormalize: int,
    epsilon: float,
    minimum: float,
    factor: float,
    first_expert: int,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the experts i32 [T, top_k] of the rows of x [T, H], counted from `first_expert`, and their weights f32.

    The order of sums is the same for all numbers of tokens. The forward context gets the number of all experts. To
    `counts` i64 [E], if given, it adds how often each expert was chosen by the first `num_real` i32 [1] rows.
    """
    num_rows, num_experts = len(x), len(weight)
    ids = new_indices(x, num_rows, top_k)
    weights = x.new_empty(num_rows, top_k, dtype=torch.float32)
    if num_rows:
        sums = _sums(x, weight)
        _choose[(num_rows,)](
            sums, sums if bias is None else bias, sums if choice_bias is None else choice_bias, ids, weights,
            ids if counts is None else counts, ids if num_real is None else num_real,
            num_rows, epsilon, minimum, factor, first_expert, len(sums),
            num_experts, next_power_of_2(num_experts), top_k, next_power_of_2(top_k), scoring,
            num_groups, next_power_of_2(num_groups), top_groups, group_best, bool(renormalize),
            bias is not None, choice_bias is not None, counts is not None, num_warps=1, **PDL,
        )  # fmt: skip
    forward_context.current().routing_of(ids).num_experts = num_experts
    return ids, weights


def num_experts_of(topk_ids: Tensor) -> int:
    """Return the number of experts of all ranks, or 0 if the ids are not those of `moe_route`."""
    return forward_context.current().routing_of(topk_ids).num_experts


def set_written(topk_ids: Tensor) -> None:
    """Declare that every later kernel begins after these ids are in memory, because one that waits for them before it
    lets the next one begin has been launched.
    """
    forward_context.current().routing_of(topk_ids).are_written = True


def are_written(topk_ids: Tensor) -> bool:
    """Return whether a kernel may read these ids before it waits for its inputs."""
    return forward_context.current().routing_of(topk_ids).are_written


def order_of(topk_ids: Tensor, num_experts: int) -> Order:
    """Return the slots by expert. They are sorted once in a forward pass.

    Slots of experts of other ranks are left out: those places, before `starts[0]` and behind `starts[num_experts]`, are
    not written.
    """
    routing = forward_context.current().routing_of(topk_ids)
    if routing.order is None:
        routing.order = _sorted(topk_ids.view(-1), num_experts)
    return routing.order


def add_gated(x: Tensor, y: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """Return x + y * sigmoid(hidden · weight) of [T, N], [T, N], [T, K] and [K]."""
    out, (num_rows, width) = torch.empty_like(x), x.shape
    if num_rows:
        block = next_power_of_2(max(width, hidden.shape[1]))
        _add_gated[(num_rows,)](x, y, hidden, weight, out, width, hidden.shape[1], block, num_warps=8, **PDL)
    return out


def _sums(x: Tensor, weight: Tensor) -> Tensor:
    """Return parts of the logits, float32 [parts, T, E]: of a chunk of the inputs each, or of all."""
    (num_rows, width), num_experts = x.shape, len(weight)
    parts = cdiv(width, CHUNK) if num_rows <= LARGE else 1
    rows, experts = 16 if num_rows <= SMALL else 32, 32 if min(num_rows - LARGE, num_experts - 32) <= 0 else 64
    out = x.new_empty(parts, num_rows, num_experts, dtype=torch.float32)
    _logits[(cdiv(num_rows, rows), cdiv(num_experts, experts), parts)](
        x, weight, out, num_rows, num_experts, width, CHUNK if parts > 1 else cdiv(width, CHUNK) * CHUNK,
        rows, experts, CHUNK, DEPTH, num_rows <= SMALL and parts > 1, num_warps=4, num_stages=4, **PDL,
    )  # fmt: skip
    return out


def _sorted(ids: Tensor, num_experts: int) -> Order:
    slots, starts = new_indices(ids, len(ids)), new_indices(ids, num_experts + 1)
    _sort[(num_experts + 1,)](ids, slots, starts, len(ids), num_experts, COMPARED, num_warps=4, **PDL)
    return Order(slots, starts)


@triton.jit
def _inputs_at(at, k, width):
    """Return columns `k` of the rows that begin at `at`."""
    return tl.load(at + k[None, :], mask=(k < width)[None, :], other=0)


@triton.jit
def _add_products(sums, rows, experts):
    """Add the products of rows and experts, which are exact in float32 if both have the same type of 16 bits."""
    if rows.dtype == experts.dtype and rows.dtype.primitive_bitwidth == 16:
        return tl.dot(rows, tl.trans(experts), sums)
    return tl.dot(rows.to(tl.float32), tl.trans(experts.to(tl.float32)), sums, input_precision="tf32x3")


@kernel
def _logits(
    x, weight, out, num_rows, num_experts, width, length,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, DEPTH: tl.constexpr, IS_ONE_CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute a part of the router's logits: the products of `length` inputs, which are added up chunk by chunk."""
    begin_next()
    m, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    part, k = tl.program_id(2), tl.arange(0, DEPTH)
    at_expert = weight + tl.minimum(n, num_experts - 1)[:, None] * width
    at_row = x + tl.minimum(m, num_rows - 1).to(tl.int64)[:, None] * width
    begin = part * length
    if IS_ONE_CHUNK:  # its weights are read before the inputs are there
        tl.static_assert(CHUNK == 4 * DEPTH)
        experts = _inputs_at(at_expert, begin + k, width)
        experts_1 = _inputs_at(at_expert, begin + DEPTH + k, width)
        experts_2 = _inputs_at(at_expert, begin + 2 * DEPTH + k, width)
        experts_3 = _inputs_at(at_expert, begin + 3 * DEPTH + k, width)
        wait_for_inputs()
        sums = tl.zeros([ROWS, EXPERTS], tl.float32)
        sums = _add_products(sums, _inputs_at(at_row, begin + k, width), experts)
        sums = _add_products(sums, _inputs_at(at_row, begin + DEPTH + k, width), experts_1)
        sums = _add_products(sums, _inputs_at(at_row, begin + 2 * DEPTH + k, width), experts_2)
        sums = _add_products(sums, _inputs_at(at_row, begin + 3 * DEPTH + k, width), experts_3)
    else:
        wait_for_inputs()
        sums, own = tl.zeros([ROWS, EXPERTS], tl.float32), tl.zeros([ROWS, EXPERTS], tl.float32)
        end = begin + tl.cdiv(tl.minimum(length, width - begin), CHUNK) * CHUNK
        for start in range(begin, end, DEPTH):  # one loop instead of two, whose loads would wait for each chunk
            own = _add_products(own, _inputs_at(at_row, start + k, width), _inputs_at(at_expert, start + k, width))
            is_chunk = (start + DEPTH) % CHUNK == 0
            sums = tl.where(is_chunk, sums + own, sums)
            own = tl.where(is_chunk, 0.0, own)
    is_out = (m < num_rows)[:, None] & (n < num_experts)[None, :]
    at = (part * num_rows + m).to(tl.int64)[:, None] * num_experts + n[None, :]
    tl.store(out + at, sums, mask=is_out)


@kernel
def _choose(
    sums, bias, choice_bias, ids, weights, counts, num_real, num_rows, epsilon, minimum, factor, first_expert,
    PARTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, SCORING: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    RENORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CHOICE_BIAS: tl.constexpr, IS_COUNTED: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token. EXPERTS, SLOTS, GROUPS: the numbers of them rounded up to powers of two.

    The next kernel begins after the wait, when the programs of the logits have ended: beside these, its programs would
    be distributed unevenly over the multiprocessors.
    """
    wait_for_inputs()
    begin_next()
    row = tl.program_id(0).to(tl.int64)
    e, j = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    is_expert = e < NUM_EXPERTS
    scores = tl.zeros([EXPERTS], tl.float32)
    for part in tl.static_range(PARTS):
        at_part = sums + (part * num_rows + row) * NUM_EXPERTS + e
        scores += tl.load(at_part, mask=is_expert, other=-float("inf"))
    if HAS_BIAS:
        scores += tl.load(bias + e, mask=is_expert, other=0).to(tl.float32)
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
    left = tl.where(is_expert, _ordered(choice), NONE_LEFT)
    for slot in tl.static_range(TOP_K):
        best = tl.min(tl.where(left == tl.max(left, 0), e, EXPERTS), 0)
        left = tl.where(e == best, NONE_LEFT, left)
        chosen_ids = tl.where(j == slot, best, chosen_ids)
        chosen = tl.where(j == slot, tl.sum(tl.where(e == best, scores, 0.0), 0), chosen)
    if SCORING == 2:
        powers = tl.where(j < TOP_K, tl.exp(chosen - tl.max(tl.where(j < TOP_K, chosen, -float("inf")), 0)), 0.0)
        chosen = powers / tl.sum(powers, 0)
    if RENORMALIZE:
        chosen = chosen / tl.maximum(tl.sum(chosen, 0) + epsilon, minimum)
    at = row * TOP_K + j
    tl.store(ids + at, chosen_ids - first_expert, mask=j < TOP_K)
    tl.store(weights + at, chosen * factor, mask=j < TOP_K)
    _count(counts, num_real, row, chosen_ids, j < TOP_K, IS_COUNTED)


@triton.jit
def _count(counts, num_real, row, chosen_ids, is_slot, IS_COUNTED: tl.constexpr):
    """Add the choices of a token that is no padding."""
    if IS_COUNTED:
        is_counted = is_slot & (row < tl.load(num_real))
        tl.atomic_add(counts + chosen_ids, tl.full(chosen_ids.shape, 1, tl.int64), mask=is_counted, sem="relaxed")


@triton.jit
def _ordered(values):
    """Return whole numbers in the order of these, since a warp finds the largest of such with one instruction."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


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
def _sort(ids, slots, starts, count, num_experts, COMPARED: tl.constexpr):
    """Store the slots of one expert behind those of the experts before it, in their order."""
    begin_next()
    wait_for_inputs()
    expert, i = tl.program_id(0), tl.arange(0, COMPARED)
    before = tl.zeros([COMPARED], tl.int32)
    for start in range(0, count, COMPARED):
        slot = start + i
        before += (tl.load(ids + slot, mask=slot < count, other=num_experts) < expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts + expert, place)
    if expert < num_experts:
        for start in range(0, count, COMPARED):
            slot = start + i
            is_own = tl.load(ids + slot, mask=slot < count, other=-1) == expert
            own = is_own.to(tl.int32)
            tl.store(slots + place + tl.cumsum(own, 0) - own, slot, mask=is_own)
            place += tl.sum(own, 0)


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
