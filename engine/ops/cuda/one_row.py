"""The product of one row with packed weights of 8 or 4 bits (lowbit.py, fp8.py), without the tensor cores: these want
eight rows, and weights and activations in an order of theirs.

A thread has 16 bytes of some rows of weights at a time. A code among the upper bits of a float32 that is 1 is a number
already, without a conversion; what it has too much is taken from the sum, once.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, wait_for_inputs
from engine.ops.cuda.lowbit_values import number

NARROW, WIDE = 5120, 10240  # columns: so many programs, and what each does best with
ONE, ONE_AND_SIGN = tl.constexpr(0x3F800000), tl.constexpr(0x3FC00000)  # bits of 1.0; and the highest of a fraction
# The exponent of an 8-bit float, as that of a float32, is too small by 2^120.
FP8_BEFORE, FP8_AFTER = tl.constexpr(2.0**64), tl.constexpr(2.0**56)


class Tile(NamedTuple):
    rows: int  # of weights
    warps: int
    registers: int  # so few that many programs run at once


class Stored(NamedTuple):
    """As the ops have it."""

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: Tensor | None


def tile_for(columns: int, kind: str) -> Tile:
    """As measured on an H200."""
    if NARROW < columns <= WIDE:
        return Tile(4, 2, 80)
    if kind == "int4":
        return Tile(8, 2 if columns <= NARROW else 1, 168)
    return Tile(8, 4, 128) if columns <= NARROW else Tile(4, 1, 80)


def multiply(x: Tensor, stored: Stored, out: Tensor, kind: str, *, is_gated: bool) -> None:
    """x [1, K], of bf16 numbers, times the weights [N, K]: into `out`, [1, N], or the `swiglu` of that."""
    words, scale, zero, bias = stored
    columns, width, num_blocks = out.shape[1], x.shape[1], words.shape[1]
    tile = tile_for(columns, kind)
    threads = 32 * tile.warps
    is_even = num_blocks * 8 % threads == 0 and width == num_blocks * (256 if kind == "int4" else 128)
    _multiply[(triton.cdiv(columns, tile.rows // (1 + is_gated)),)](
        x, words, scale, scale if zero is None else zero, scale if bias is None else bias, out, columns, width,
        num_blocks, kind, zero is not None, bias is not None, is_gated, is_even, tile.rows, threads,
        num_warps=tile.warps, num_stages=1, maxnreg=tile.registers, **PDL,
    )  # fmt: skip


@triton.jit
def _multiply(
    x, words, scale, zero, bias, out, columns, width, num_blocks,
    KIND: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """ROWS outputs; gated: half as many of the gate and of what it is for, whose rows of weights follow all of the
    gate's. KIND: int8, int4, fp8, or fp8 with a scale for each block. IS_EVEN: THREADS divide a row, and no column is
    a filler's."""
    begin_next()
    OWN: tl.constexpr = ROWS // (1 + IS_GATED)
    PARTS: tl.constexpr = 4 if KIND == "int4" else 2
    first = tl.program_id(0) * OWN
    i = tl.arange(0, ROWS)
    row = (tl.minimum(first + i % OWN, columns - 1) + i // OWN * columns).to(tl.int64)
    thread = tl.arange(0, THREADS)
    pairs = words.to(tl.pointer_type(tl.int32)) + row[:, None] * num_blocks * 32
    count = columns * (1 + IS_GATED)
    ahead = _pairs_at(pairs, 0, num_blocks, ROWS, THREADS)
    scales_ahead, zeros_ahead = _scales_at(scale, zero, thread, row, count, num_blocks, KIND, HAS_ZERO)
    wait_for_inputs()
    sums = tl.zeros([ROWS, THREADS], tl.float32)
    finer_sums = tl.zeros([ROWS, THREADS], tl.float32)
    total = tl.zeros([1, THREADS], tl.float32)
    # An instruction takes one constant: the other has to be a number that the compiler does not know.
    one = (ONE if KIND == "int4" else ONE_AND_SIGN) + (num_blocks >> 31)
    for start in range(0, num_blocks * 8, THREADS):
        own, scales, zeros = ahead, scales_ahead, zeros_ahead
        ahead = _pairs_at(pairs, start + THREADS, num_blocks, ROWS, THREADS)
        scales_ahead, zeros_ahead = _scales_at(
            scale, zero, start + THREADS + thread, row, count, num_blocks, KIND, HAS_ZERO
        )
        word = start * 8 + tl.arange(0, 8 * THREADS)
        for part in tl.static_range(PARTS):
            k = (word // 64 * PARTS + part) * 64 + word % 64
            values = tl.load(x + k) if IS_EVEN else tl.load(x + k, mask=k < width, other=0)
            values = tl.reshape(values.to(tl.float32), (1, THREADS, 8))
            found, of_x = _products(own, values, one, scales, zeros, part, KIND, HAS_ZERO)
            total += of_x
            if KIND == "int4" and part % 2 == 0:
                finer_sums += found
            else:
                sums += found
    if KIND == "int4":
        sums = sums * 16 + finer_sums * 256
    elif KIND == "int8":
        sums = (sums - total * 1.5) * 256  # without the 1 of each number, and 128 / 256
    else:
        sums *= FP8_AFTER
    y = tl.sum(sums, 1)
    if KIND == "int8" or KIND == "fp8":
        y *= tl.load(scale + row)
    if HAS_BIAS:
        y += tl.load(bias + row).to(tl.float32)
    if IS_GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, OWN)), (1, 0)))
        y = gate / (1 + tl.exp(-gate)) * up
    n = first + tl.arange(0, OWN)
    tl.store(out + n, y, mask=n < columns)


@triton.jit
def _pairs_at(pairs, start, num_blocks, ROWS: tl.constexpr, THREADS: tl.constexpr):
    """Pairs of words, of each thread four of each row; none behind the last of a row."""
    at = start * 4 + tl.arange(0, 4 * THREADS)[None, :]
    loaded = tl.load(pairs + at, mask=at < num_blocks * 32, other=0)
    return tl.reshape(loaded, (ROWS, THREADS, 4))


@triton.jit
def _scales_at(scale, zero, at, row, count, num_blocks, KIND: tl.constexpr, HAS_ZERO: tl.constexpr):
    if KIND == "int4" or KIND == "fp8 by blocks":
        # So that neighbours among the threads are so in the compiler's order, as they are where words are read.
        place = tl.minimum(at // 8, num_blocks - 1)[:, None] * count + row[None, :]
        scales = tl.trans(tl.load(scale + place))
        return scales, tl.trans(tl.load(zero + place)) if HAS_ZERO else scales
    else:
        return at, at


@triton.jit
def _products(
    pairs, values, one, scales, zeros, PART: tl.constexpr, KIND: tl.constexpr, HAS_ZERO: tl.constexpr
):  # fmt: skip
    """[rows, threads]: the sums of x by a part of the weights, those of 4 bits less what they have too much; and of x.
    By 16 or, the even parts of 4 bits and all of 8, by 256 too small."""
    numbers, of_x = _numbers(pairs, one, PART, KIND), tl.sum(values, 2)
    if KIND == "int4":
        FACTOR: tl.constexpr = 16.0 if PART % 2 else 256.0
        origin = 1 + (8 + number(zeros, PART)) / FACTOR if HAS_ZERO else 1 + 8 / FACTOR
        found = (tl.sum(numbers * values, 2) - of_x * origin) * number(scales, PART)
    elif KIND == "int8":
        found = tl.sum(numbers * values, 2)
    else:
        found = tl.sum(numbers * (values * FP8_BEFORE), 2)
        found = found * scales if KIND == "fp8 by blocks" else found
    return found, of_x


@triton.jit
def _numbers(pairs, one, PART: tl.constexpr, KIND: tl.constexpr):
    """[rows, threads, 8]: of the lower and of the upper word of each pair, one after the other, as the columns are."""
    if KIND == "int4":
        both = tl.join(_nibble(pairs, one, PART), _nibble(pairs, one, PART + 4))
    elif KIND == "int8":
        both = tl.join(_byte(pairs, one, PART), _byte(pairs, one, PART + 2))
    else:
        both = tl.join(_float(pairs, PART), _float(pairs, PART + 2))
    return tl.reshape(both, (pairs.shape[0], pairs.shape[1], 8))


@triton.jit
def _moved(pairs, BY: tl.constexpr):
    """To the left, or back."""
    if BY >= 0:
        return pairs << BY
    else:
        return pairs >> -BY


@triton.jit
def _nibble(pairs, one, PLACE: tl.constexpr):
    """By turns 1 + code / 256 and 1 + code / 16, so that one shift is for two."""
    moved = _moved(pairs, 15 - PLACE // 2 * 8)
    return ((moved & (0x00780000 if PLACE % 2 else 0x00078000)) | one).to(tl.float32, bitcast=True)


@triton.jit
def _byte(pairs, one, PLACE: tl.constexpr):
    """1 + (code + 128) / 256."""
    moved = _moved(pairs, 15 - PLACE * 8)
    return ((moved & 0x007F8000) ^ one).to(tl.float32, bitcast=True)


@triton.jit
def _float(pairs, PLACE: tl.constexpr):
    """By 2^-120 too small."""
    moved = (pairs << 24 - 8 * PLACE) >> 4
    return (moved & -0x78100000).to(tl.float32, bitcast=True)
