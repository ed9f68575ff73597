"""Products of sorted slots with packed matrices of their experts on the tensor cores for 8-bit floats.

A row of activations is the sum of two rows of 8-bit floats (e4m3), as in fp8.py. An integer of 4 bits needs no
conversion: the 8-bit float with these bits is the integer times 2^-9, and the sums are corrected by what it is too
large by. The scale of a group of columns multiplies the sum over these columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda import fp8
from engine.ops.cuda.experts_kernels import FP8, INT4, block_of, distance, store_outputs
from engine.ops.cuda.fp8_kernels import to_fp8
from engine.ops.cuda.launch import INTERPRETED, PDL, begin_next, cdiv, kernel, next_power_of_2, wait_for_inputs
from engine.ops.cuda.lowbit_values import number, round_bf16
from engine.ops.cuda.routing import order_of

if TYPE_CHECKING:
    from engine.ops.cuda.experts import ExpertWeights

IS_FP8 = tl.constexpr(FP8)
FEWEST_SLOTS = 8  # of a program: the tensor cores multiply at least so many
FEW_SLOTS = 8  # of an expert, on average: for more, larger tiles on the tensor cores for 16 bits are faster
GROUP_SIZE_M = 8  # tiles of slots that go over the same weights at a time
WORDS = 64  # of a block of packed codes
CODE_PARTS = 8  # rows of 128 bytes of a block: low or high codes, nearest number or remainder, even or odd bytes
UNIT_OF_CODE = tl.constexpr(2.0**9)


class Fp8ExpertTile(NamedTuple):
    columns: int  # outputs of a program; of the gate and of `up` together
    stages: int  # blocks of inputs that are multiplied or being loaded


TILES = {INT4: Fp8ExpertTile(128, 3), FP8: Fp8ExpertTile(64, 4)}  # the fastest on an H200


def can_multiply(stored: ExpertWeights, num_slots: int, num_experts: int) -> bool:
    """Return whether the kernel has tiles for these matrices, and is the fastest for so many slots."""
    is_packed = stored.kind in TILES and stored.weight.shape[2] == WORDS
    return is_packed and are_few(num_slots, num_experts) and fp8.are_multiplied()


def are_few(num_slots: int, num_experts: int) -> bool:
    return num_slots <= FEW_SLOTS * num_experts


def launch(
    x: Tensor, topk_ids: Tensor, stored: ExpertWeights, out: Tensor, weights: Tensor | None, act: dict[str, Any]
) -> None:
    """Multiply the row of each slot, or with `weights` a row per slot, by the matrix of its expert: [slots, N]."""
    (num_rows, top_k), is_gated, columns = topk_ids.shape, weights is None, out.shape[1]
    num_slots, num_experts = num_rows * top_k, stored.num_rows // (columns * (1 + is_gated))
    assert stored.scale is not None
    numbers, totals, x_scale = _high_and_low(x, stored)
    order, tile = order_of(topk_ids, num_experts), TILES[stored.kind]
    num_blocks = num_slots // FEWEST_SLOTS + min(num_slots, num_experts)
    across = cdiv(columns, tile.columns // (1 + is_gated))
    activation = (act["activation"], act["limit"] > 0) if is_gated else (0, False)
    limits = (act["limit"], act["alpha"], act["offset"]) if is_gated else (0.0, 0.0, 0.0)
    zero, bias = (stored.scale if each is None else each for each in (stored.zero, stored.bias))
    multiply[(num_blocks * across,)](
        numbers, totals, x_scale, order.slots, order.starts, stored.weight, stored.table, stored.scale, zero, bias,
        x_scale if weights is None else weights, out, *limits, num_blocks, columns, stored.weight.shape[1],
        num_experts, len(x), next_power_of_2(num_experts + 1),
        top_k if is_gated else 1, stored.kind, stored.kind == FP8 and len(stored.scale) > 1, stored.zero is not None,
        stored.bias is not None, is_gated, *activation, FEWEST_SLOTS, tile.columns, GROUP_SIZE_M, stored.unit,
        tile.stages, num_warps=4, num_stages=tile.stages, **PDL,
    )  # fmt: skip


def _high_and_low(x: Tensor, stored: ExpertWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Return x as pairs of 8-bit floats, their sums, which only codes of 4 bits need, and their scales."""
    num_blocks = stored.weight.shape[1]
    if stored.kind == INT4:
        return split_by_parts(x, num_blocks)
    numbers, scale = fp8.high_and_low(x, num_blocks)
    return numbers, scale, scale


def split_by_parts(x: Tensor, num_blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [T, K] as 8-bit floats [T, blocks, 8 * 128] in the order of packed codes of 4 bits, their sums
    f32 [T, blocks, 4] by low or high codes and even or odd bytes, and scales f32 [T, blocks] of both.

    Even and odd bytes of a block have scales of their own, so that a row of numbers has zeros in place of either.
    """
    num_rows, width = x.shape
    numbers = x.new_empty(num_rows, num_blocks, 128 * CODE_PARTS, dtype=torch.float8_e4m3fn)
    totals = x.new_empty(num_rows, num_blocks, 4, dtype=torch.float32)
    scale = x.new_empty(num_rows, num_blocks, dtype=torch.float32)
    _split_by_parts[(num_rows, num_blocks)](x, numbers, totals, scale, width, num_blocks, num_warps=2, **PDL)
    return numbers, totals, scale


@kernel
def _split_by_parts(x, activations, totals, scale, width, num_blocks):
    begin_next()
    wait_for_inputs()
    place = tl.program_id(0).to(tl.int64) * num_blocks + tl.program_id(1)
    # Two times 128 bytes: low codes and high codes.
    i = tl.arange(0, 256)
    byte, upper = i % 128, i // 128
    k = tl.program_id(1) * 256 + upper * 64 + byte % 2 * 128 + byte // 2
    at_x = x + tl.program_id(0).to(tl.int64) * width
    values = round_bf16(tl.load(at_x + k, mask=k < width, other=0).to(tl.float32)).to(tl.float32)
    bits = tl.max(tl.abs(values)).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(bits >> 23, 8), 254)
    values *= ((261 - exponent) << 23).to(tl.float32, bitcast=True)  # the largest: 128 or more, below 256
    nearest = to_fp8(values)
    rest = to_fp8(values - nearest.to(tl.float32))
    nothing = tl.zeros_like(values).to(tl.float8e4nv)
    is_odd = byte % 2 == 1
    at = activations + place * 1024 + upper * 512 + byte
    tl.store(at, tl.where(is_odd, nothing, nearest))
    tl.store(at + 128, tl.where(is_odd, nearest, nothing))
    tl.store(at + 256, tl.where(is_odd, nothing, rest))
    tl.store(at + 384, tl.where(is_odd, rest, nothing))
    whole = tl.reshape(nearest.to(tl.float32) + rest.to(tl.float32), (2, 64, 2))
    tl.store(totals + place * 4 + tl.arange(0, 4), tl.reshape(tl.sum(whole, 1), (4,)))
    is_nan = tl.sum(values * 0)  # not a number in a block that is not finite, which the result then has to be
    tl.store(scale + place, ((exponent - 7) << 23).to(tl.float32, bitcast=True) + is_nan)


@kernel
def multiply(
    activations, totals, x_scale, slots, starts, words, table, scale, zero, bias, slot_weights, out, limit, alpha,
    offset, num_blocks, columns, num_word_blocks, num_experts, num_rows,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr, IS_BLOCKED: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_LIMIT: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr, GROUP_SIZE_M: tl.constexpr, UNIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply up to SLOTS slots of one expert by COLUMNS rows of its matrix, as `grouped` of experts_kernels.py."""
    begin_next()
    wait_for_inputs()
    OWN: tl.constexpr = COLUMNS // (1 + IS_GATED)
    across = tl.cdiv(columns, OWN)
    group = tl.program_id(0) // (GROUP_SIZE_M * across) * GROUP_SIZE_M
    size = tl.minimum(num_blocks - group, GROUP_SIZE_M)
    index = tl.program_id(0) % (GROUP_SIZE_M * across)
    expert, first, end = block_of(starts, group + index % size, num_experts, EXPERTS, SLOTS)
    if first < end:
        first_column = index // size * OWN
        i = tl.arange(0, COLUMNS)
        n = tl.minimum(first_column + i % OWN, columns - 1) + i // OWN * columns
        count = columns * (1 + IS_GATED)
        row = expert.to(tl.int64) * count + n
        matrix = (words + distance(table, expert, num_experts, UNIT)).to(tl.pointer_type(tl.uint8))
        rows_of_words = matrix + row * num_word_blocks * 128
        num_weights = count.to(tl.int64) * num_experts
        m = first + tl.arange(0, SLOTS)
        slot = tl.load(slots + tl.minimum(m, end - 1))
        if KIND == IS_FP8:
            row_of_x = _repeated(slot // TOP_K, 2).to(tl.int64) + tl.arange(0, 2 * SLOTS) // SLOTS * num_rows
            rows_of_x = activations + row_of_x * num_word_blocks * 128
            sums = _sums_of_fp8(
                rows_of_words, rows_of_x, scale + row, num_weights, num_word_blocks, IS_BLOCKED, STAGES
            )  # fmt: skip
            sums *= tl.load(x_scale + slot // TOP_K)[None, :]
        else:
            place = (slot // TOP_K).to(tl.int64) * num_word_blocks
            sums = _sums_of_int4(
                rows_of_words, activations, totals, x_scale, place, scale + row, zero + row, num_weights,
                num_word_blocks, HAS_ZERO, STAGES,
            )  # fmt: skip
        store_outputs(
            sums, bias + row, slot_weights, out, slot, m < end, first_column, columns, limit, alpha, offset,
            HAS_BIAS, IS_GATED, ACTIVATION, HAS_LIMIT,
        )  # fmt: skip


@triton.jit
def _sums_of_fp8(
    rows_of_words, rows_of_x, at_scale, num_weights, num_blocks, IS_BLOCKED: tl.constexpr, STAGES: tl.constexpr
):
    """Return the products [COLUMNS, SLOTS] of 8-bit floats. `rows_of_x` are the nearest numbers of all slots, then
    their remainders."""
    at_words = rows_of_words[:, None] + tl.arange(0, 128)[None, :]
    at_x = rows_of_x[:, None] + tl.arange(0, 128)[None, :]
    both = tl.zeros([rows_of_words.shape[0], rows_of_x.shape[0]], tl.float32)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        weights = tl.load(at_words + block * 128).to(tl.float8e4nv, bitcast=True)
        part = tl.dot(weights, tl.trans(tl.load(at_x + block * 128)))
        both += part * tl.load(at_scale + block * num_weights)[:, None] if IS_BLOCKED else part
    nearest, rest = _two(both)
    sums = nearest + rest
    return sums if IS_BLOCKED else sums * tl.load(at_scale)[:, None]


@triton.jit
def _sums_of_int4(
    rows_of_words, activations, totals, x_scale, place, at_scale, at_zero, num_weights, num_blocks,
    HAS_ZERO: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the products [COLUMNS, SLOTS] of codes of 4 bits with the blocks of x from `place` [SLOTS] on."""
    SLOTS: tl.constexpr = place.shape[0]
    # Of each slot even bytes, odd bytes, and both of the remainders.
    at_x = (activations + _repeated(place, 4) * 1024 + tl.arange(0, 4 * SLOTS) // SLOTS * 128)[:, None]
    at_x += tl.arange(0, 128)[None, :]
    at_totals = totals + _repeated(place, 2) * 4 + tl.arange(0, 2 * SLOTS) // SLOTS
    at_words = rows_of_words[:, None] + tl.arange(0, 128)[None, :]
    sums = tl.zeros([rows_of_words.shape[0], SLOTS], tl.float32)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        low, high = _codes(tl.load(at_words + block * 128))
        scales = tl.load(at_scale + block * num_weights)
        zeros = tl.load(at_zero + block * num_weights) if HAS_ZERO else scales
        part = _scaled(low, at_x + block * 1024, at_totals + block * 4, scales, zeros, 0, HAS_ZERO)
        part += _scaled(high, at_x + block * 1024 + 512, at_totals + block * 4 + 2, scales, zeros, 1, HAS_ZERO)
        sums += part * tl.load(x_scale + place + block)[None, :]
    return sums


@triton.jit
def _scaled(codes, at_x, at_totals, scales, zeros, PART: tl.constexpr, HAS_ZERO: tl.constexpr):
    """Return the products [COLUMNS, SLOTS] of the low (PART 0) or high codes of a block of weights."""
    nearest, rest = _two(tl.dot(codes, tl.trans(tl.load(at_x))))
    found = (nearest + rest) * UNIT_OF_CODE
    totals = tl.load(at_totals)[None, :]
    if HAS_ZERO:
        even, odd = _two(found)
        of_even, of_odd = _two(tl.broadcast_to(totals, found.shape))
        even -= of_even * (number(zeros, PART) + 8)[:, None]
        odd -= of_odd * (number(zeros, PART + 2) + 8)[:, None]
    else:
        even, odd = _two(found - 8 * totals)
    return even * number(scales, PART)[:, None] + odd * number(scales, PART + 2)[:, None]


@triton.jit
def _repeated(values, TIMES: tl.constexpr):
    """Return `values` [n] TIMES times, one after another."""
    return tl.reshape(tl.broadcast_to(values[None, :], (TIMES, values.shape[0])), (TIMES * values.shape[0],))


@triton.jit
def _two(sums):
    """Split [rows, columns] into the left and the right half of the columns."""
    parts = tl.reshape(sums, (sums.shape[0], 2, sums.shape[1] // 2))
    return tl.split(tl.permute(parts, (0, 2, 1)))


@triton.jit
def _codes(packed):
    """Return the lower and the upper four bits of bytes as 8-bit floats."""
    if INTERPRETED:
        low, high = packed & 15, packed >> 4
    else:
        low, high = tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0x0F0F0F0F; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0F0F0F0F;", "=r,=r,r", [packed],
            dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4,
        )  # fmt: skip
    return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
