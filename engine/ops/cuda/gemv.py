"""Product of one row with packed weights of 8 or 4 bits (lowbit.py), in integers: tensor cores need eight rows, and
converting each code to a float would be most of the work.

A chunk is 16 bytes of a row of weights, which a thread reads at once: the codes of eight columns of each part of a
block. Eight numbers of x are written as integer multiples of a common unit, a power of two; one instruction (dp2a) adds
two products of these with codes. Programs are persistent and process several rows of weights each, so that the integers
of x are computed once for many rows.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import INTERPRETED, PDL, begin_next, cdiv, kernel, next_power_of_2, num_sms, wait_for_inputs

REGISTERS = 65536  # of an SM
MOST_PROGRAMS = 10  # of an SM: more would make x whole more often than it is used
# A whole number below 2^22 added to these bits of a float32, 1.5 * 2^23, is the float32 that is larger by as much.
ORIGIN, ORIGIN_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)
# Bits of a whole number of x: 16 with its sign; beside codes of 8 bits so few that eight products stay below 2^22.
BITS_BY_4, BITS_BY_8 = tl.constexpr(15), tl.constexpr(12)
ONES = tl.constexpr(0x01010101)  # four codes


class GemvTile(NamedTuple):
    """Tile of a program, and how it runs."""

    chunks: int  # of a row of weights
    rows: int  # of weights, that a program has at a time
    warps: int
    registers: int  # so few that many programs run at once


class PackedArrays(NamedTuple):
    """Arrays of a packed weight of an op, and its bias."""

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: Tensor | None


def tile_for(num_chunks: int, bits: int) -> GemvTile:
    """Return the fastest tile on an H200: a thread for each chunk of a row, if a row has a few hundred chunks."""
    chunks = max(32, next_power_of_2(num_chunks))
    if chunks <= (256 if bits == 4 else 512):
        return GemvTile(chunks, 4, chunks // 32, 80 if bits == 4 else 64)
    return GemvTile(chunks, 2, min(chunks // 64, 16), 64 if bits == 8 and chunks <= 1024 else 112)


def multiply(x: Tensor, stored: PackedArrays, out: Tensor, bits: int, *, is_gated: bool) -> None:
    """Write x [1, K] of bf16 numbers times the weights [N, K] to `out` [1, N]; with `is_gated`, the `swiglu` of the
    product.
    """
    words, scale, zero, bias = stored
    columns, num_blocks = out.shape[1], words.shape[1]
    tile = tile_for(num_blocks * 8, bits)
    groups = cdiv(columns, tile.rows // (1 + is_gated))
    per_sm = min(REGISTERS // (32 * tile.warps * tile.registers), MOST_PROGRAMS)
    _multiply[(min(groups, per_sm * num_sms()),)](
        x, words, scale, scale if zero is None else zero, scale if bias is None else bias, out, columns, x.shape[1],
        num_blocks, groups, bits, zero is not None, bias is not None, is_gated, tile.rows, tile.chunks,
        num_warps=tile.warps, num_stages=1, maxnreg=tile.registers, **PDL,
    )  # fmt: skip


@kernel
def _multiply(
    x, words, scale, zero, bias, out, columns, width, num_blocks, groups,
    BITS: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Compute groups of ROWS outputs. With IS_GATED, half of them belong to the gate and half to the gated values,
    whose rows of weights follow all of the gate's.
    """
    begin_next()
    step, count = tl.num_programs(0), columns * (1 + IS_GATED)
    row = rows_of(tl.program_id(0), columns, IS_GATED, ROWS)
    ahead = codes_at(words, row, num_blocks, CHUNKS)
    scales_ahead = scales_at(scale, row, count, num_blocks, BITS, CHUNKS)
    zeros_ahead = scales_at(zero, row, count, num_blocks, BITS, CHUNKS) if HAS_ZERO else scales_ahead
    wait_for_inputs()
    x0, x1, x2, x3, total, unit = whole_parts(x, width, tl.arange(0, 8 * CHUNKS), BITS, CHUNKS)
    # Codes of 4 bits are 8 too large.
    start = total * (-8 if BITS == 4 else 0) + ORIGIN_BITS
    for group in range(tl.program_id(0), groups, step):
        own, scales, zeros = ahead, scales_ahead, zeros_ahead
        following = rows_of(group + step, columns, IS_GATED, ROWS)
        ahead = codes_at(words, following, num_blocks, CHUNKS)
        scales_ahead = scales_at(scale, following, count, num_blocks, BITS, CHUNKS)
        zeros_ahead = scales_at(zero, following, count, num_blocks, BITS, CHUNKS) if HAS_ZERO else scales_ahead
        found = products(own, x0, x1, x2, x3, start, BITS)
        y, row = (
            sums_of(found, scales, zeros, total, unit, BITS == 4, HAS_ZERO),
            rows_of(group, columns, IS_GATED, ROWS),
        )
        if BITS == 8:
            y *= tl.load(scale + row)
        if HAS_BIAS:
            y += tl.load(bias + row).to(tl.float32)
        OWN: tl.constexpr = ROWS // (1 + IS_GATED)
        if IS_GATED:
            gate, up = tl.split(tl.permute(tl.reshape(y, (2, OWN)), (1, 0)))
            y = gate / (1 + tl.exp(-gate)) * up
        n = group * OWN + tl.arange(0, OWN)
        tl.store(out + n, y, mask=n < columns)


@triton.jit
def rows_of(group, columns, IS_GATED: tl.constexpr, ROWS: tl.constexpr):
    """Return the rows of weights of a group. Beyond the end the last row is repeated, and its results are discarded."""
    OWN: tl.constexpr = ROWS // (1 + IS_GATED)
    i = tl.arange(0, ROWS)
    return tl.minimum(group * OWN + i % OWN, columns - 1) + i // OWN * columns


@triton.jit
def codes_at(words, row, num_blocks, CHUNKS: tl.constexpr):
    """Load codes as i32 [rows, chunks, 4]. Beyond the end the last chunk is repeated; x is 0 there."""
    i = tl.arange(0, 4 * CHUNKS)
    at = tl.minimum(i // 4, num_blocks * 8 - 1) * 4 + i % 4
    pairs = words.to(tl.pointer_type(tl.int32)) + row.to(tl.int64)[:, None] * (num_blocks * 32)
    return tl.reshape(tl.load(pairs + at[None, :]), (row.shape[0], CHUNKS, 4))


@triton.jit
def scales_at(scale, row, count, num_blocks, BITS: tl.constexpr, CHUNKS: tl.constexpr):
    """Load scales as bf16 [rows, chunks, 4], for 4 bits only. The access pattern is that of the codes, so that a thread
    has the scales of its own codes.
    """
    if BITS == 4:
        i = tl.arange(0, 4 * CHUNKS)
        block = tl.minimum(i // 32, num_blocks - 1)
        at = (block[None, :] * count + row[:, None]) * 4 + i[None, :] % 4
        loaded = tl.load(scale.to(tl.pointer_type(tl.bfloat16)) + at)
        return tl.reshape(loaded, (row.shape[0], CHUNKS, 4))
    else:
        return row


@triton.jit
def products(own, x0, x1, x2, x3, start, BITS: tl.constexpr):
    """Return `start` plus the products of codes i32 [rows, chunks, 4] and the integers of x: [rows, chunks, parts]."""
    c0, c1, c2, c3 = _four(own)
    first, last = _codes_of(c0, c1, BITS), _codes_of(c2, c3, BITS)
    found = tl.broadcast_to(start, first.shape)
    found = _add_two(x1, first, _add_two(x0, first, found, "lo", BITS), "hi", BITS)
    return _add_two(x3, last, _add_two(x2, last, found, "lo", BITS), "hi", BITS)


@triton.jit
def sums_of(found, scales, zeros, total, unit, HAS_SCALES: tl.constexpr, HAS_ZERO: tl.constexpr):
    """Return the sums [rows] of these products with units, and with scales [rows, chunks, parts or 1]."""
    sums = found.to(tl.float32, bitcast=True) * unit - ORIGIN * unit
    if HAS_ZERO:
        sums -= zeros.to(tl.float32) * (total.to(tl.float32) * unit)
    if HAS_SCALES:
        sums *= scales.to(tl.float32)
    return tl.sum(tl.sum(sums, 2), 1)


@triton.jit
def whole_parts(x, width, word, BITS: tl.constexpr, CHUNKS: tl.constexpr):
    """Return, for each part of each chunk [1, chunks, parts], its eight numbers of x as integers, two in each of the
    first four results, their sum, and the unit.

    `word` [8 * CHUNKS] are the words of the row that x is multiplied with; x and its width may differ from word to
    word, if several rows are multiplied and their products added up.
    """
    a0, a1, a2, a3, a_total, a_unit = _whole(x, width, word, 0, BITS, CHUNKS)
    b0, b1, b2, b3, b_total, b_unit = _whole(x, width, word, 1, BITS, CHUNKS)
    if BITS == 8:
        x0, x1, x2, x3 = tl.join(a0, b0), tl.join(a1, b1), tl.join(a2, b2), tl.join(a3, b3)
        return x0, x1, x2, x3, tl.join(a_total, b_total), tl.join(a_unit, b_unit)
    else:
        c0, c1, c2, c3, c_total, c_unit = _whole(x, width, word, 2, BITS, CHUNKS)
        d0, d1, d2, d3, d_total, d_unit = _whole(x, width, word, 3, BITS, CHUNKS)
        x0, x1 = _joined(a0, b0, c0, d0), _joined(a1, b1, c1, d1)
        x2, x3 = _joined(a2, b2, c2, d2), _joined(a3, b3, c3, d3)
        return x0, x1, x2, x3, _joined(a_total, b_total, c_total, d_total), _joined(a_unit, b_unit, c_unit, d_unit)


@triton.jit
def _whole(x, width, word, PART: tl.constexpr, BITS: tl.constexpr, CHUNKS: tl.constexpr):
    PARTS: tl.constexpr = 16 // BITS
    WHOLE_BITS: tl.constexpr = BITS_BY_4 if BITS == 4 else BITS_BY_8
    k = (word // 64 * PARTS + PART) * 64 + word % 64
    values = tl.reshape(tl.load(x + k, mask=k < width, other=0).to(tl.float32), (1, CHUNKS, 8))
    # Powers of two by their exponents alone: the largest number becomes one of WHOLE_BITS bits. As whole numbers, of
    # which those that stand for NaN are the largest.
    exponent = tl.maximum(tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2) >> 23, 32)
    of_unit = exponent - WHOLE_BITS + 1
    inverse = ((254 - of_unit) << 23).to(tl.float32, bitcast=True)
    unit = (of_unit << 23).to(tl.float32, bitcast=True)
    unit = tl.where(exponent == 255, float("nan"), unit)  # for what is not finite
    whole = (values * inverse[:, :, None] + ORIGIN).to(tl.int32, bitcast=True)
    low, high = tl.split(tl.reshape(whole, (1, CHUNKS, 4, 2)))
    x0, x1, x2, x3 = _four((low & 0xFFFF) | (high << 16))
    ones = tl.full([1, CHUNKS], ONES, tl.int32)
    total = _add_two(x1, ones, _add_two(x0, ones, tl.zeros_like(ones), "lo", 4), "lo", 4)
    total = _add_two(x3, ones, _add_two(x2, ones, total, "lo", 4), "lo", 4)
    return x0, x1, x2, x3, total, unit


@triton.jit
def _four(own):
    """Split [.., .., 4] into four."""
    even, odd = tl.split(tl.reshape(own, (own.shape[0], own.shape[1], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _joined(a, b, c, d):
    """Join what `_four` has split."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], a.shape[1], 4))


@triton.jit
def _codes_of(left, right, BITS: tl.constexpr):
    """Return the codes of four columns, one byte each, from two pairs of words [.., ..]: [.., .., parts]."""
    low, high = _bytes(left, right, 0), _bytes(left, right, 1)
    if BITS == 4:
        return _joined(low & 0x0F0F0F0F, (low >> 4) & 0x0F0F0F0F, high & 0x0F0F0F0F, (high >> 4) & 0x0F0F0F0F)
    else:
        return tl.join(low, high)


@triton.jit
def _bytes(left, right, UPPER: tl.constexpr):
    """Return the lower or the upper bytes of four words."""
    if INTERPRETED:
        a, b = left >> 8 * UPPER, right >> 8 * UPPER
        return (a & 0xFF) | ((a >> 8) & 0xFF00) | ((b & 0xFF) << 16) | (((b >> 16) & 0xFF) << 24)
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7531;" if UPPER else "prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [left, right],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _add_two(pair, codes, sums, HALF: tl.constexpr, BITS: tl.constexpr):
    """Add the products of two 16-bit numbers with the lower or upper two of four codes to the sums. Codes of 8 bits are
    signed.
    """
    if INTERPRETED:
        two = codes >> 16 if HALF == "hi" else codes
        if BITS == 4:
            low, high = two & 0xFF, (two >> 8) & 0xFF
        else:
            low, high = (two << 24) >> 24, (two << 16) >> 24
        return sums + ((pair << 16) >> 16) * low + (pair >> 16) * high
    else:
        return tl.inline_asm_elementwise(
            "dp2a." + HALF + (".s32.u32" if BITS == 4 else ".s32.s32") + " $0, $1, $2, $3;", "=r,r,r,r",
            [pair, codes, sums], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
