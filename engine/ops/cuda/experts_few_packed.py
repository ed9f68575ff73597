"""Products of a few tokens with packed matrices of their experts, without sorting and without the tensor cores: each
slot reads its expert's rows. experts_few.py does the same with matrices that are not packed.

A block of inputs is stored in WORDS words of 16 bits. A word holds two numbers of 8 bits or four of 4 bits, whose
inputs are WORDS apart (fp8.py, lowbit.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.experts_kernels import FP8, IS_FP8, IS_INT4, IS_INT8, activated, distance, is_here
from engine.ops.cuda.fp8_kernels import widened
from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, next_power_of_2, wait_for_inputs
from engine.ops.cuda.lowbit_values import bytes_of, parts_of
from engine.ops.cuda.routing import num_experts_of

if TYPE_CHECKING:
    from engine.ops.cuda.experts import ExpertWeights

# Fastest on an H200 with the shapes of Qwen3-30B-A3B, Mixtral-8x7B and gpt-oss-20b
ROWS, WARPS = 8, 2  # rows of weights of a program
NUM_WORDS, MORE_WORDS = 128, 256  # of a row at a time
LONG = 512  # words of a row from which `down` has MORE_WORDS at a time


def gate_up(x: Tensor, topk_ids: Tensor, stored: ExpertWeights, out: Tensor, **act: Any) -> None:
    """Store the activations [T, top_k * F] of the experts of each row of x in `out`."""
    (num_rows, top_k), width = topk_ids.shape, x.shape[1]
    columns = out.shape[1] // top_k
    if num_rows:
        grid = num_rows * top_k, cdiv(columns, ROWS // 2)
        _gate_up[grid](
            x, topk_ids, *_arrays(stored), out, act["limit"], act["alpha"], act["offset"], columns, width,
            *_shape(stored), top_k, *_experts(stored, topk_ids, 2 * columns), *_kind(stored), act["activation"],
            act["limit"] > 0, ROWS, _blocks(stored, NUM_WORDS), stored.weight.shape[2], stored.unit,
            num_warps=WARPS, **PDL,
        )  # fmt: skip


def down(h: Tensor, topk_ids: Tensor, topk_weights: Tensor, stored: ExpertWeights, out: Tensor) -> None:
    """Store the weighted sums [T, N] of the products of h [T, top_k * K] in `out`."""
    (num_rows, top_k), columns = topk_ids.shape, out.shape[1]
    width, slots = h.shape[1] // top_k, next_power_of_2(top_k)
    rows = max(1, ROWS // slots)
    num_words = MORE_WORDS if stored.weight.shape[1:].numel() > LONG else NUM_WORDS
    if num_rows:
        _down[(num_rows, cdiv(columns, rows))](
            h, topk_ids, topk_weights, *_arrays(stored), out, columns, width, *_shape(stored), top_k,
            *_experts(stored, topk_ids, columns), *_kind(stored), slots, rows, _blocks(stored, num_words),
            stored.weight.shape[2], stored.unit,
            num_warps=WARPS, **PDL,
        )  # fmt: skip


def _arrays(stored: ExpertWeights) -> tuple[Tensor, ...]:
    """Return words, table, scales, zero points and biases. Those that are missing are not read."""
    assert stored.scale is not None
    others = (stored.scale if each is None else each for each in (stored.zero, stored.bias))
    return stored.weight, stored.table, stored.scale, *others


def _shape(stored: ExpertWeights) -> tuple[int, int]:
    """Return the number of blocks of a row, and the number of rows of all experts."""
    return stored.weight.shape[1], stored.num_rows


def _experts(stored: ExpertWeights, topk_ids: Tensor, rows_of_each: int) -> tuple[int, bool]:
    """Return the number of experts of this rank, and whether these are all."""
    num_experts = stored.num_rows // rows_of_each
    return num_experts, num_experts == num_experts_of(topk_ids)


def _kind(stored: ExpertWeights) -> tuple[int, bool, bool, bool]:
    assert stored.scale is not None
    is_blocked = stored.kind == FP8 and len(stored.scale) > 1
    return stored.kind, is_blocked, stored.zero is not None, stored.bias is not None


def _blocks(stored: ExpertWeights, num_words: int) -> int:
    """Return how many blocks of a row a program has at a time."""
    _, num_blocks, words = stored.weight.shape
    return min(max(1, num_words // words), next_power_of_2(num_blocks))


@kernel
def _gate_up(
    x, topk_ids, words, table, scale, zero, bias, out, limit, alpha, offset, columns, width, num_blocks, num_rows,
    top_k, num_experts, HAS_ALL: tl.constexpr, KIND: tl.constexpr, IS_BLOCKED: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute half as many outputs of one slot as ROWS."""
    begin_next()
    OWN: tl.constexpr = ROWS // 2
    slot, first = tl.program_id(0), tl.program_id(1) * OWN
    i = tl.arange(0, ROWS)
    n = tl.minimum(first + i % OWN, columns - 1) + i // OWN * columns
    wait_for_inputs()
    expert = tl.load(topk_ids + slot)
    if HAS_ALL | is_here(expert, num_experts):
        row = expert.to(tl.int64) * columns * 2 + n
        at_x = x + (slot // top_k).to(tl.int64) * width + tl.zeros([1, 1, 1], tl.int32)
        y = _products(
            at_x, words + distance(table, expert, num_experts, UNIT), scale, zero, row, True, width, num_blocks,
            num_rows, KIND, IS_BLOCKED, HAS_ZERO, ROWS, BLOCKS, WORDS,
        )  # fmt: skip
        if HAS_BIAS:
            y += tl.load(bias + row).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, OWN)), (1, 0)))
        own = first + tl.arange(0, OWN)
        result = activated(gate, up, limit, alpha, offset, ACTIVATION, HAS_LIMIT)
        tl.store(out + slot.to(tl.int64) * columns + own, result, mask=own < columns)


@kernel
def _down(
    h, topk_ids, topk_weights, words, table, scale, zero, bias, out, columns, width, num_blocks, num_rows, top_k,
    num_experts, HAS_ALL: tl.constexpr, KIND: tl.constexpr, IS_BLOCKED: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Compute ROWS outputs of one token. SLOTS is the number of its slots, rounded up to a power of two; the slots
    behind the last one repeat it and are left out of the sum."""
    begin_next()
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    i = tl.arange(0, SLOTS * ROWS)
    n, j = tl.minimum(first + i % ROWS, columns - 1), i // ROWS
    slot = token * top_k + tl.minimum(j, top_k - 1)
    wait_for_inputs()
    expert = tl.load(topk_ids + slot)
    has_expert = HAS_ALL | is_here(expert, num_experts)
    row = tl.where(has_expert, expert, 0).to(tl.int64) * columns + n
    at_h = h + (slot * width)[:, None, None]
    at_words = words + distance(table, expert, num_experts, UNIT)[:, None, None]
    y = _products(
        at_h, at_words, scale, zero, row, has_expert[:, None, None], width, num_blocks, num_rows, KIND, IS_BLOCKED,
        HAS_ZERO, SLOTS * ROWS, BLOCKS, WORDS,
    )  # fmt: skip
    if HAS_BIAS:
        y += tl.load(bias + row).to(tl.float32)
    y *= tl.load(topk_weights + slot)
    y = tl.sum(tl.reshape(tl.where((j < top_k) & has_expert, y, 0.0), (SLOTS, ROWS)), 0)
    own = first + tl.arange(0, ROWS)
    tl.store(out + token * columns + own, y, mask=own < columns)


@triton.jit
def _products(
    at_x, words, scale, zero, row, has_expert, width, num_blocks, num_rows, KIND: tl.constexpr,
    IS_BLOCKED: tl.constexpr, HAS_ZERO: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Return the products [ROWS] of these rows of weights and the inputs at `at_x`, [1, 1, 1] or [ROWS, 1, 1]. No words
    are read for rows without `has_expert`, [ROWS, 1, 1] or one value."""
    b, w = tl.arange(0, BLOCKS)[None, :, None], tl.arange(0, WORDS)[None, None, :]
    at = words + (row[:, None, None] * num_blocks + b) * WORDS + w
    ahead = tl.load(at, mask=has_expert & (b < num_blocks), other=0)
    sums = tl.zeros([ROWS, BLOCKS, WORDS], tl.float32)
    for start in range(0, num_blocks, BLOCKS):
        own, block = ahead, start + b
        ahead = tl.load(at + (start + BLOCKS) * WORDS, mask=has_expert & (block + BLOCKS < num_blocks), other=0)
        place, is_block = block.to(tl.int64) * num_rows + row[:, None, None], block < num_blocks
        if KIND == IS_INT4:
            scales = tl.load(scale + place, mask=is_block, other=0)
            zeros = tl.load(zero + place, mask=is_block, other=0) if HAS_ZERO else scales
            first, second, third, fourth = parts_of(own, scales, zeros, HAS_ZERO)
            k = block * 4 * WORDS + w
            sums += first.to(tl.float32) * _inputs(at_x, k, width)
            sums += second.to(tl.float32) * _inputs(at_x, k + WORDS, width)
            sums += third.to(tl.float32) * _inputs(at_x, k + 2 * WORDS, width)
            sums += fourth.to(tl.float32) * _inputs(at_x, k + 3 * WORDS, width)
        else:
            low, high = bytes_of(own) if KIND == IS_INT8 else widened(own)
            k = block * 2 * WORDS + w
            part = low.to(tl.float32) * _inputs(at_x, k, width) + high.to(tl.float32) * _inputs(at_x, k + WORDS, width)
            sums += part * tl.load(scale + place, mask=is_block, other=0) if IS_BLOCKED else part
    y = tl.sum(tl.reshape(sums, (ROWS, BLOCKS * WORDS)), 1)
    if (KIND == IS_FP8 and not IS_BLOCKED) or KIND == IS_INT8:
        y *= tl.load(scale + row)
    return y


@triton.jit
def _inputs(at_x, k, width):
    return tl.load(at_x + k, mask=k < width, other=0).to(tl.float32)
