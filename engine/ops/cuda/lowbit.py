"""Matrix products with weights of 8 and 4 bits, which are packed at load into what the kernels read.

A word of 16 bits has the codes of 2 or 4 columns that are 64 apart, so that each of its parts makes of a tile of words
a tile of 64 columns, in registers, as the tensor cores take it; one row does without these (gemv.py). With
`linear_a8w8` the codes themselves are multiplied. Of 4-bit codes in groups of 32 the columns of a word are 32 apart, so
that a part is a group there, too. On Hopper, 4-bit products of 65 to 2,048 rows have a kernel of their own
(int4_gemm.py).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops.cuda.gemv import PackedArrays, multiply
from engine.ops.cuda.launch import INTERPRETED, PDL, cdiv
from engine.ops.cuda.lowbit_kernels import add_splits, gemm
from engine.ops.cuda.lowbit_skinny_gemm import int4_skinny_gemm, skinny_gemm
from engine.ops.cuda.lowbit_values import codes_of, unpack
from engine.ops.cuda.pointwise import swiglu

if TYPE_CHECKING:
    from engine.ops.cuda.int4_gemm import Int4Plan
try:
    from engine.ops.cuda import int4_gemm
except ImportError:  # a Triton without Gluon
    int4_gemm = None  # type: ignore[assignment]

MAX_SKINNY_ROWS = 16  # of x, that the skinny kernels take
MAX_PACKED_ROWS = 512  # of x; for more of them weights are unpacked once for a product of cuBLAS
PROGRAMS = 132  # of the GEMM kernel that an H100 runs at once; of small ones twice as many
NARROW = 5120  # columns: a program of a skinny kernel has to ask for more at a time
TINY = 2048  # columns: tiles of skinny kernels are smaller, so that the device is busy
WIDE = 16384  # columns: large tiles pay
VAST = 24576  # columns: 96 programs with 256 rows of weights
MIN_BLOCKS = 4  # of columns, that are worth a program
WORDS = 64  # of a row in a block of columns
HALF = WORDS // 2


class PackedWeight(NamedTuple):
    """Weight in the layout that the kernels read."""

    words: Tensor  # i16 [N, blocks, 64 or 32], or i8 [N, blocks, 128]: the codes themselves
    scale: Tensor  # f32 [N], or i64 [blocks, N]: four bf16, one for each part of a block
    zero: Tensor | None = None  # as such a scale, less 8


class LowbitTile(NamedTuple):
    """Tile of a program of the GEMM kernel."""

    columns: int
    rows: int
    words: int  # of a column, at a time
    warps: int = 8


class Int4SkinnyTile(NamedTuple):
    """Tile of a program of the skinny kernel for 4-bit codes."""

    shares: int  # blocks of columns that are multiplied at once
    weights: int  # rows of weights
    lines: int  # of 128 bytes, of each row of weights and share, that are fetched before the inputs are there
    num_warps: int
    num_stages: int


class LowbitSkinnyTile(NamedTuple):
    """Tile of a program of the skinny kernel for 8-bit codes."""

    slices: int  # of the columns, which warps take by turns
    rows: int  # of weights
    num_warps: int
    num_stages: int


# By the most rows they are for: tiles for few columns, for more, for many.
INT4_TILES = {
    64: (LowbitTile(128, 64, WORDS), LowbitTile(64, 64, WORDS, 4), LowbitTile(256, 64, WORDS)),
    128: (LowbitTile(64, 64, WORDS, 4), LowbitTile(128, 64, WORDS), LowbitTile(256, 128, HALF)),
}
LARGE_INT4_TILES = LowbitTile(128, 64, WORDS), LowbitTile(128, 128, WORDS), LowbitTile(256, 128, HALF)
SKINNY_LINES = 16  # of 128 bytes, of each row of weights, that a program asks for before its inputs are there


def pack_int8(weight: Tensor, scale: Tensor) -> PackedWeight:
    parts = _filled_up(weight, 2 * WORDS).view(len(weight), -1, 2, WORDS)
    return PackedWeight(parts.transpose(2, 3).contiguous().view(torch.int16).squeeze(3), scale)


def pack_a8w8(weight: Tensor, scale: Tensor) -> PackedWeight:
    return PackedWeight(_filled_up(weight, 2 * WORDS).view(len(weight), -1, 2 * WORDS), scale)


def pack_int4(weight: Tensor, scale: Tensor, zero: Tensor | None = None) -> PackedWeight:
    group = 2 * weight.shape[1] // scale.shape[1]
    pairs = _filled_up(weight, 2 * group)
    parts = torch.stack((pairs & 15, pairs >> 4), 2).view(len(weight), -1, 4, group)
    both = parts[:, :, ::2] | parts[:, :, 1::2] << 4
    words = both.transpose(2, 3).contiguous().view(torch.int16).squeeze(3)
    less = None if zero is None else _by_blocks(zero.float().sub(8).to(torch.bfloat16))
    return PackedWeight(words, _by_blocks(scale), less)


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
    """Multiply with int8 weights; also serves `linear_a8w8`, which the type of the words selects. With `is_gated`,
    return the `swiglu` of the product. `dtype` is the type of the result, if it is not that of x.
    """
    return _linear(x, PackedWeight(words, scale), bias, dtype or x.dtype, is_gated=is_gated)


def linear_int4(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    is_gated: bool = False,
) -> Tensor:
    return _linear(x, PackedWeight(words, scale, zero), bias, x.dtype, is_gated=is_gated)


linear_a8w8 = linear_int8
gated_linear_int8 = gated_linear_a8w8 = partial(linear_int8, is_gated=True)
gated_linear_int4 = partial(linear_int4, is_gated=True)
logits_int8 = partial(linear_int8, dtype=torch.float32)


def _linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype, *, is_gated: bool) -> Tensor:
    num_rows, is_whole = len(x), weight.words.dtype == torch.int8
    planned = _int4_plan(x, weight)
    if num_rows > MAX_PACKED_ROWS and not is_whole and not planned:
        y = functional.linear(_rounded(x).to(x.dtype), unpack(weight, x), None if bias is None else bias.to(x.dtype))
        return swiglu(y) if is_gated else y.to(dtype)
    fused = is_gated and (planned.splits == 1 if planned else num_rows <= MAX_SKINNY_ROWS)
    out = x.new_empty(num_rows, len(weight.words) // (1 + fused), dtype=dtype)
    if planned:
        int4_gemm.multiply(_rounded(x), weight, bias, out, planned)
    elif num_rows:
        given = codes_of(x) if is_whole else (_rounded(x), x)
        _launch(given, weight, bias, out, is_gated=fused)
    return swiglu(out) if is_gated and not fused else out


def _int4_plan(x: Tensor, weight: PackedWeight) -> Int4Plan | None:
    """Return the plan of the product if the kernel for Hopper computes it."""
    if int4_gemm is None or weight.scale.dtype != torch.int64:
        return None
    num_weights, num_blocks, _ = weight.words.shape
    return int4_gemm.plan(len(x), num_weights, num_blocks, x.shape[1])


def _rounded(x: Tensor) -> Tensor:
    """Round to bf16, because the interpreter computes bf16 in float32."""
    rounded = x.to(torch.bfloat16)
    return rounded.float() if INTERPRETED else rounded


def skinny_tile(columns: int) -> LowbitSkinnyTile:
    """Return the fastest tile on an H200."""
    return LowbitSkinnyTile(4, 16, 4, 6 if columns <= NARROW else 4)


def int4_skinny_tile(num_rows: int, num_weights: int) -> Int4SkinnyTile:
    """Return the fastest tile on an H100 for this number of rows of weights. Programs with fewer rows of weights would
    read x more often than the weights.
    """
    if num_weights >= WIDE:
        return Int4SkinnyTile(1, 256 if num_weights >= VAST else 128, 8, 8, 5)
    shares = 4 if num_weights <= NARROW else 2
    return Int4SkinnyTile(shares, 16 if num_weights <= TINY else 32, 4, 4, 4 if num_rows <= 8 else 3)


def gemm_tile(num_rows: int, columns: int, bits: int) -> LowbitTile:
    """Return the fastest tile, as measured on an H200, for 4 bits on an H100."""
    if bits == 4 and num_rows > 32:
        tiles = next((tiles for most, tiles in INT4_TILES.items() if num_rows <= most), LARGE_INT4_TILES)
        return tiles[(columns > NARROW) + (columns >= WIDE)]
    if num_rows > 128 and columns >= WIDE:
        return LowbitTile(128, 256, HALF)
    return LowbitTile(128, 32 if num_rows <= 32 else 64 if num_rows <= 64 else 128, WORDS)


def num_splits(num_rows: int, num_programs: int, num_blocks: int, bits: int) -> int:
    """Return the number of splits of the columns that keeps the device busy. It is a power of two, so that few kernels
    are compiled.
    """
    room = PROGRAMS * (1 + (bits == 8 and num_rows <= 64)) // num_programs
    return 1 << max(1, min(room, num_blocks // MIN_BLOCKS, 8)).bit_length() - 1


def _launch(
    given: tuple[Tensor, Tensor], weight: PackedWeight, bias: Tensor | None, out: Tensor, *, is_gated: bool
) -> None:
    (x, x_scale), (words, scale, zero) = given, weight
    num_rows, columns = out.shape
    bits, is_whole = 4 if scale.dtype == torch.int64 else 8, words.dtype == torch.int8
    kind = bits, is_whole, zero is not None, bias is not None, words.shape[2]
    inputs = x, x_scale, words, scale, scale if zero is None else zero, scale if bias is None else bias, out
    sizes = num_rows, columns, x.shape[1], words.shape[1]
    if num_rows == 1 and words.shape[2] == WORDS:
        multiply(x, PackedArrays(words, scale, zero, bias), out, bits, is_gated=is_gated)
        return
    if num_rows <= MAX_SKINNY_ROWS and bits == 4:
        small = int4_skinny_tile(num_rows, columns * (1 + is_gated))
        int4_skinny_gemm[(cdiv(columns, small.weights // (1 + is_gated)),)](
            x, *inputs[2:], *sizes, *kind[2:], is_gated, small.shares, small.weights, 8 if num_rows <= 8 else 16,
            small.lines, num_warps=small.num_warps, num_stages=small.num_stages, **PDL,
        )  # fmt: skip
        return
    if num_rows <= MAX_SKINNY_ROWS:
        tile = skinny_tile(columns)
        is_even = words[0].numel() * (1 if is_whole else 2) == x.shape[1] and words.shape[1] % tile.slices == 0
        skinny_gemm[(cdiv(columns, tile.rows // (1 + is_gated)),)](
            *inputs[:4], *inputs[5:], *sizes, is_whole, *kind[3:], is_gated, is_even, tile.slices, tile.rows,
            8 if num_rows <= 8 else 16, SKINNY_LINES, num_warps=tile.num_warps, num_stages=tile.num_stages, **PDL,
        )  # fmt: skip
        return
    large = gemm_tile(num_rows, columns, bits)
    down, across = cdiv(num_rows, large.rows), cdiv(columns, large.columns)
    splits = num_splits(num_rows, down * across, words.shape[1], bits)
    sums = out if splits == 1 else out.new_empty(splits, num_rows, columns, dtype=torch.float32)
    num_stages = 4 if large.warps == 4 else 3 if zero is None or large.rows < 128 else 2  # an SM has no room for more
    slice_words = min(large.words, words.shape[2]) * (1 + is_whole)
    gemm[(down, across, splits)](
        *inputs[:-1], sums, *sizes, *kind, large.columns, large.rows, splits, slice_words,
        num_warps=large.warps, num_stages=num_stages, **PDL,
    )  # fmt: skip
    if splits > 1:
        add_splits(sums, out)
