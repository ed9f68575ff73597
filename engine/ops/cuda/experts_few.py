"""Products of a few tokens with the matrices of their experts, without sorting: each slot reads its expert's rows, and
nothing if another rank has the expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton.language as tl
from torch import Tensor

from engine.ops.cuda.experts_kernels import activated, distance, is_here
from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, next_power_of_2, wait_for_inputs
from engine.ops.cuda.one_shot_all_reduce import CAPACITY, PeerBuffers, ranks_of, recipients, send_columns
from engine.ops.cuda.routing import num_experts_of

if TYPE_CHECKING:
    from engine.ops.cuda.experts import ExpertWeights

# Rows of weights of a program, and inputs at a time: the fastest on an H100 in the shape of Qwen3-30B-A3B and in that
# of its share on two GPUs.
GATE_UP_ROWS, DOWN_ROWS = 16, 16
GATE_UP_DEPTH, DOWN_DEPTH = 512, 128


def gate_up(x: Tensor, topk_ids: Tensor, stored: ExpertWeights, out: Tensor, num_experts: int, **act: Any) -> None:
    """Store the activations [T, top_k * F] of the experts of each row of x in `out`."""
    (num_rows, top_k), width = topk_ids.shape, x.shape[1]
    columns = out.shape[1] // top_k
    if num_rows:
        grid = num_rows * top_k, cdiv(columns, GATE_UP_ROWS // 2)
        _gate_up[grid](
            x, topk_ids, *_arrays(stored), out, act["limit"], act["alpha"], act["offset"],
            columns, width, top_k, num_experts, num_experts == num_experts_of(topk_ids), stored.bias is not None,
            act["activation"], act["limit"] > 0, GATE_UP_ROWS, min(GATE_UP_DEPTH, next_power_of_2(width)),
            stored.unit, num_warps=4, **PDL,
        )  # fmt: skip


def sends(topk_ids: Tensor) -> bool:
    """Return whether `down` can send the sums to other ranks: those of one token, two columns of a program or more."""
    return len(topk_ids) == 1 and _down_rows(topk_ids) > 1


def _down_rows(topk_ids: Tensor) -> int:
    return max(1, DOWN_ROWS // next_power_of_2(topk_ids.shape[1]))


def down(  # noqa: PLR0913 - as in experts.py
    h: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    stored: ExpertWeights,
    out: Tensor,
    num_experts: int,
    to: PeerBuffers | None = None,
) -> None:
    """Store the weighted sums [T, N] of the products of h [T, top_k * K] in `out`, and send those of one token to the
    ranks of `to`."""
    (num_rows, top_k), columns = topk_ids.shape, out.shape[1]
    width, slots, rows = h.shape[1] // top_k, next_power_of_2(top_k), _down_rows(topk_ids)
    if num_rows:
        _down[(num_rows, cdiv(columns, rows))](
            h, topk_ids, topk_weights, *_arrays(stored), out, *recipients(to, h), columns, width, top_k, num_experts,
            num_experts == num_experts_of(topk_ids), stored.bias is not None, slots, rows,
            min(DOWN_DEPTH, next_power_of_2(width)), stored.unit, *ranks_of(to), CAPACITY, num_warps=4, **PDL,
        )  # fmt: skip


def _arrays(stored: ExpertWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Return matrices, table and biases. Those that are missing are not read."""
    weight, bias = stored.weight, stored.bias
    return weight, stored.table, weight if bias is None else bias


@kernel
def _gate_up(
    x, topk_ids, weight, table, bias, out, limit, alpha, offset, columns, width, top_k, num_experts,
    HAS_ALL: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute half as many outputs of one slot as ROWS."""
    OWN: tl.constexpr = ROWS // 2
    slot, first = tl.program_id(0), tl.program_id(1) * OWN
    i, k = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    n = tl.minimum(first + i % OWN, columns - 1) + i // OWN * columns
    wait_for_inputs()
    begin_next()  # only now, so that the ids are there wherever `_down` runs
    expert = tl.load(topk_ids + slot)
    if HAS_ALL | is_here(expert, num_experts):
        row = expert.to(tl.int64) * columns * 2 + n
        matrix = weight + distance(table, expert, num_experts, UNIT)
        at, at_x = matrix + row[:, None] * width + k[None, :], x + (slot // top_k).to(tl.int64) * width + k
        ahead = tl.load(at, mask=(k < width)[None, :], other=0)
        sums = tl.zeros([ROWS, DEPTH], tl.float32)
        for start in range(0, width, DEPTH):
            own = ahead
            ahead = tl.load(at + start + DEPTH, mask=(start + DEPTH + k < width)[None, :], other=0)
            values = tl.load(at_x + start, mask=start + k < width, other=0).to(tl.float32)
            sums += own.to(tl.float32) * values[None, :]
        y = tl.sum(sums, 1)
        if HAS_BIAS:
            y += tl.load(bias + row).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, OWN)), (1, 0)))
        column = first + tl.arange(0, OWN)
        result = activated(gate, up, limit, alpha, offset, ACTIVATION, HAS_LIMIT)
        tl.store(out + slot.to(tl.int64) * columns + column, result, mask=column < columns)


@kernel
def _down(
    h, topk_ids, topk_weights, weight, table, bias, out, addresses, calls, columns, width, top_k, num_experts,
    HAS_ALL: tl.constexpr, HAS_BIAS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    UNIT: tl.constexpr, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Compute ROWS outputs of one token. SLOTS is the number of its slots, rounded up to a power of two."""
    begin_next()
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    i, k = tl.arange(0, SLOTS * ROWS), tl.arange(0, DEPTH)
    n, j = tl.minimum(first + i % ROWS, columns - 1), i // ROWS
    slot = token * top_k + tl.minimum(j, top_k - 1)
    if UNIT > 0:  # the table of offloaded experts
        wait_for_inputs()
    expert = tl.load(topk_ids + slot, cache_modifier=".cg")  # not from a cache of the time before they were there
    is_slot = (j < top_k) & (HAS_ALL | is_here(expert, num_experts))
    row = expert.to(tl.int64) * columns + n
    first_number = row * width + distance(table, expert, num_experts, UNIT)
    at, at_h = weight + first_number[:, None] + k[None, :], h + slot[:, None] * width + k[None, :]
    ahead = tl.load(at, mask=is_slot[:, None] & (k < width)[None, :], other=0)
    if UNIT == 0:
        wait_for_inputs()
    sums = tl.zeros([SLOTS * ROWS, DEPTH], tl.float32)
    for start in range(0, width, DEPTH):
        own = ahead
        is_in = is_slot[:, None] & (start + DEPTH + k < width)[None, :]
        ahead = tl.load(at + start + DEPTH, mask=is_in, other=0)
        values = tl.load(at_h + start, mask=(start + k < width)[None, :], other=0)
        sums += own.to(tl.float32) * values.to(tl.float32)
    y = tl.sum(sums, 1)
    if HAS_BIAS:
        y += tl.load(bias + row, mask=is_slot, other=0).to(tl.float32)
    y *= tl.load(topk_weights + slot, mask=is_slot, other=0)
    y = tl.sum(tl.reshape(tl.where(is_slot, y, 0.0), (SLOTS, ROWS)), 0)
    own = first + tl.arange(0, ROWS)
    if NUM_RANKS > 1:
        is_bf16: tl.constexpr = out.dtype.element_ty == tl.bfloat16
        send_columns(y, first, columns, addresses, calls, RANK, NUM_RANKS, CAPACITY, is_bf16)
    tl.store(out + token * columns + own, y, mask=own < columns)
