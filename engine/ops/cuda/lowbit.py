"""Matrix products with weights of 8 and 4 bits, which are packed at load into what the kernels read.

A word of 16 bits has the codes of 2 or 4 columns that are 64 apart, so that each of its parts makes of a tile of words
a tile of 64 columns, in registers, as the tensor cores take it. With `linear_a8w8` the codes themselves are multiplied.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from engine.ops.cuda.launch import PDL, begin_next, wait_for_inputs
from engine.ops.cuda.lowbit_values import codes_of, prefetch, unpack, weights_of
from engine.ops.cuda.pointwise import swiglu

INTERPRETED = triton.knobs.runtime.interpret
FEW = 16  # rows: the kernel for them shares out the columns of a tile to its warps
MANY = 1024  # above, weights are unpacked once for a product of cuBLAS
WORDS = 64  # of a row in a block of columns


class Packed(NamedTuple):
    words: Tensor  # i16 [N, blocks, 64], or i8 [N, blocks, 128]: the codes themselves
    scale: Tensor  # f32 [N], or i64 [blocks, N]: four bf16, one for each part of a block
    zero: Tensor | None = None  # as such a scale, less 8


class Tile(NamedTuple):
    """What a program of the kernel for few rows does at a time."""

    slices: int  # of the columns, which warps take by turns
    rows: int  # of weights
    lines: int  # of each row, of 128 bytes, that it asks for before its inputs are there
    num_warps: int
    num_stages: int


def pack_int8(weight: Tensor, scale: Tensor) -> Packed:
    parts = _filled_up(weight, 2 * WORDS).view(len(weight), -1, 2, WORDS)
    return Packed(parts.transpose(2, 3).contiguous().view(torch.int16).squeeze(3), scale)


def pack_a8w8(weight: Tensor, scale: Tensor) -> Packed:
    return Packed(_filled_up(weight, 2 * WORDS).view(len(weight), -1, 2 * WORDS), scale)


def pack_int4(weight: Tensor, scale: Tensor, zero: Tensor | None = None) -> Packed:
    pairs = _filled_up(weight, 2 * WORDS)
    parts = torch.stack((pairs & 15, pairs >> 4), 2).view(len(weight), -1, 4, WORDS)
    both = parts[:, :, ::2] | parts[:, :, 1::2] << 4
    words = both.transpose(2, 3).contiguous().view(torch.int16).squeeze(3)
    less = None if zero is None else _by_blocks(zero.float().sub(8).to(torch.bfloat16))
    return Packed(words, _by_blocks(scale), less)


PACKED_BY = {"linear_int8": pack_int8, "linear_a8w8": pack_a8w8, "linear_int4": pack_int4}  # by op


def _filled_up(weight: Tensor, multiple: int) -> Tensor:
    return functional.pad(weight, (0, -weight.shape[1] % multiple))


def _by_blocks(of_groups: Tensor) -> Tensor:
    return _filled_up(of_groups, 4).contiguous().view(torch.int64).t().contiguous()


def linear_int8(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    is_gated: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Also `linear_a8w8`: the words say it. Gated: with the `swiglu` of it; `dtype`: of the result, not that of x."""
    return _linear(x, Packed(words, scale), bias, dtype or x.dtype, is_gated=is_gated)


def linear_int4(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    is_gated: bool = False,
) -> Tensor:
    return _linear(x, Packed(words, scale, zero), bias, x.dtype, is_gated=is_gated)


linear_a8w8 = linear_int8
gated_linear_int8 = gated_linear_a8w8 = partial(linear_int8, is_gated=True)
gated_linear_int4 = partial(linear_int4, is_gated=True)
logits_int8 = partial(linear_int8, dtype=torch.float32)


def _linear(x: Tensor, weight: Packed, bias: Tensor | None, dtype: torch.dtype, *, is_gated: bool) -> Tensor:
    num_rows, is_whole = len(x), weight.words.dtype == torch.int8
    if num_rows > MANY and not is_whole:
        y = functional.linear(_rounded(x).to(x.dtype), unpack(weight, x), None if bias is None else bias.to(x.dtype))
        return swiglu(y) if is_gated else y.to(dtype)
    fused = is_gated and num_rows <= FEW
    out = x.new_empty(num_rows, len(weight.words) // (1 + fused), dtype=dtype)
    if num_rows:
        given = codes_of(x) if is_whole else (_rounded(x), x)
        _launch(given, weight, bias, out, is_gated=fused)
    return swiglu(out) if is_gated and not fused else out


def _rounded(x: Tensor) -> Tensor:
    """To bf16, which the interpreter calculates with in float32."""
    rounded = x.to(torch.bfloat16)
    return rounded.float() if INTERPRETED else rounded


def few_tile(columns: int, num_rows: int) -> Tile:
    return Tile(4, 16, 16, 4, 4)


def many_tile(columns: int, num_rows: int) -> tuple[int, int, int, int]:
    """Rows of weights, rows of x, warps, stages."""
    rows = 32 if num_rows <= 32 else 64 if num_rows <= 64 else 128
    return (128, rows, 8, 2) if columns >= 8192 else (64, min(rows, 64), 4, 4)


def _launch(given: tuple[Tensor, Tensor], weight: Packed, bias: Tensor | None, out: Tensor, *, is_gated: bool) -> None:
    (x, x_scale), (words, scale, zero) = given, weight
    num_rows, columns = out.shape
    bits = 4 if scale.dtype == torch.int64 else 8
    kind = bits, words.dtype == torch.int8, zero is not None, bias is not None
    inputs = x, x_scale, words, scale, scale if zero is None else zero, scale if bias is None else bias, out
    sizes = num_rows, columns, x.shape[1], words.shape[1]
    if num_rows <= FEW:
        tile = few_tile(columns, num_rows)
        _few[(triton.cdiv(columns, tile.rows),)](
            *inputs, *sizes, *kind, is_gated, tile.slices, tile.rows, 8 if num_rows <= 8 else 16, tile.lines,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **PDL,
        )  # fmt: skip
    else:
        block_n, block_m, num_warps, num_stages = many_tile(columns, num_rows)
        _many[(triton.cdiv(num_rows, block_m), triton.cdiv(columns, block_n))](
            *inputs, *sizes, *kind, block_n, block_m, num_warps=num_warps, num_stages=num_stages, **PDL
        )


@triton.jit(do_not_specialize=["num_rows"])
def _few(
    x, x_scale, words, scale, zero, bias, out, num_rows, columns, width, num_blocks,
    BITS: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr, SLICES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of all rows; gated: of the gate and of what it is for, whose rows of weights follow all of the
    gate's. Each slice is the sum of every SLICES-th block of columns."""
    begin_next()
    PARTS: tl.constexpr = 1 if IS_WHOLE else 16 // BITS
    WIDTH: tl.constexpr = 128 if IS_WHOLE else 64
    TYPE: tl.constexpr = tl.int32 if IS_WHOLE else tl.float32
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, columns - 1).to(tl.int64)  # behind the last one: it again, for nobody
    up = columns.to(tl.int64)
    if LINES > 0:
        prefetch(words, row, num_blocks, LINES)
        if IS_GATED:
            prefetch(words, row + up, num_blocks, LINES)
    wait_for_inputs()
    slices = tl.arange(0, SLICES)
    i = tl.arange(0, WIDTH)[None, None, :]
    m = tl.arange(0, BLOCK_M)
    is_row = (m < num_rows)[None, :, None]
    rows_of_x = x + m[None, :, None] * width
    count = columns * (1 + IS_GATED)
    sums = tl.zeros([SLICES, BLOCK_N, BLOCK_M], TYPE)
    up_sums = tl.zeros([SLICES, BLOCK_N, BLOCK_M], TYPE)
    for first in range(0, num_blocks, SLICES):
        # Columns that do not exist are zeros of x: a slice may as well read the last block again.
        block = tl.minimum(first + slices, num_blocks - 1)[:, None]
        at = words + (row[None, :] * num_blocks + block)[:, :, None] * WIDTH + i
        own = weights_of(tl.load(at), scale, zero, block * count + row[None, :], BITS, IS_WHOLE, HAS_ZERO)
        if IS_GATED:
            ups = weights_of(
                tl.load(at + up * num_blocks * WIDTH), scale, zero, block * count + row[None, :] + up,
                BITS, IS_WHOLE, HAS_ZERO,
            )  # fmt: skip
        for part in tl.static_range(PARTS):
            k = ((first + slices) * PARTS + part)[:, None, None] * WIDTH + i
            values = tl.load(rows_of_x + k, mask=is_row & (k < width), other=0)
            values = tl.permute(values, (0, 2, 1))
            sums = tl.dot(own[part], values, sums, input_precision="ieee", out_dtype=TYPE)
            if IS_GATED:
                up_sums = tl.dot(ups[part], values, up_sums, input_precision="ieee", out_dtype=TYPE)
    y = _finished(tl.sum(sums, 0), x_scale, scale, bias, m, row, num_rows, BITS, IS_WHOLE, HAS_BIAS)
    if IS_GATED:
        up_y = _finished(tl.sum(up_sums, 0), x_scale, scale, bias, m, row + up, num_rows, BITS, IS_WHOLE, HAS_BIAS)
        y = y / (1 + tl.exp(-y)) * up_y
    tl.store(out + m[None, :] * columns + n[:, None], y, mask=(m < num_rows)[None, :] & (n < columns)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _many(
    x, x_scale, words, scale, zero, bias, out, num_rows, columns, width, num_blocks,
    BITS: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of BLOCK_M rows. Programs that read the same weights begin together."""
    begin_next()
    wait_for_inputs()
    PARTS: tl.constexpr = 1 if IS_WHOLE else 16 // BITS
    WIDTH: tl.constexpr = 128 if IS_WHOLE else 64
    TYPE: tl.constexpr = tl.int32 if IS_WHOLE else tl.float32
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, columns - 1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, WIDTH)[None, :]
    rows_of_x = x + m.to(tl.int64)[:, None] * width
    is_row = (m < num_rows)[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_M], TYPE)
    for block in range(0, num_blocks):
        tile = tl.load(words + (row * num_blocks + block)[:, None] * WIDTH + i)
        own = weights_of(tile, scale, zero, block * columns + row, BITS, IS_WHOLE, HAS_ZERO)
        for part in tl.static_range(PARTS):
            k = (block * PARTS + part) * WIDTH + i
            values = tl.load(rows_of_x + k, mask=is_row & (k < width), other=0)
            sums = tl.dot(own[part], tl.trans(values), sums, input_precision="ieee", out_dtype=TYPE)
    y = _finished(sums, x_scale, scale, bias, m, row, num_rows, BITS, IS_WHOLE, HAS_BIAS)
    at = out + m.to(tl.int64)[None, :] * columns + n[:, None]
    tl.store(at, y, mask=(m < num_rows)[None, :] & (n < columns)[:, None])


@triton.jit
def _finished(
    sums, x_scale, scale, bias, m, row, num_rows, BITS: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """[BLOCK_N, BLOCK_M]: with the scales of its rows, and the bias."""
    y = sums.to(tl.float32)
    if IS_WHOLE:
        y = y * tl.load(x_scale + m, mask=m < num_rows, other=0)[None, :]
    if BITS == 8:
        y = y * tl.load(scale + row)[:, None]
    if HAS_BIAS:
        y += tl.load(bias + row).to(tl.float32)[:, None]
    return y
