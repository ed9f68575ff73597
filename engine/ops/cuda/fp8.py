"""Matrix products with weights of 8-bit floats (e4m3), which stay so on the device: a row of theirs is half as long to
read. Activations keep all of their bits.

Up to MAX_SKINNY_ROWS rows: a weight becomes bf16 in registers, for one row float32 (fp8_gemv.py). Up to
MAX_PACKED_ROWS: each row of activations becomes the sum of two rows of 8-bit floats, the nearest ones ("high") and the
remainders ("low"), which the tensor cores multiply with those of the weights twice as fast as they multiply numbers of
16 bits, by cuBLAS where a row of weights has one scale. Above, the weights are dequantized once for a product of 16
bits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.dtypes import FP8_BLOCK
from engine.ops.cuda import fp8_gemv
from engine.ops.cuda.fp8_kernels import add_high_low, dequantize, high_low_gemm, skinny_gemm, split_high_low
from engine.ops.cuda.launch import HAS_COPY_ENGINE, INTERPRETED, PDL, cdiv, next_power_of_2
from engine.ops.cuda.lowbit_kernels import add_splits
from engine.ops.cuda.pointwise import swiglu
from engine.ops.cuda.products import linear

MIN_CAPABILITY = (8, 9)  # compute capability of devices that multiply 8-bit floats
MAX_SKINNY_ROWS = 16  # of x, that the skinny kernel takes
MAX_PACKED_ROWS = 512  # of x; for more of them weights are dequantized once for a product of cuBLAS
NARROW, WIDE = 5120, 10240  # rows of weights: so many programs, and what each does best with
PROGRAMS = 264  # of `high_low_gemm` that an H100 runs at once
MIN_BLOCKS = 4  # of columns, that are worth a program
JOINED = 1024  # numbers of a program that adds up two products
ALIGNED = 16  # columns, for cuBLAS
WIDENED = 32  # rows of weights of a program


class Fp8SkinnyTile(NamedTuple):
    """Tile of a program of the skinny kernel, and how it runs."""

    slices: int  # of the columns, which warps take by turns
    rows: int  # of weights
    lines: int  # of each row, of 128 bytes, that it asks for before its inputs are there
    num_warps: int
    num_stages: int


class HighLowTile(NamedTuple):
    """Tile of a program of `high_low_gemm`, and how it runs."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


def are_multiplied() -> bool:
    """Return whether this device can multiply 8-bit floats."""
    return bool(INTERPRETED) or torch.cuda.get_device_capability() >= MIN_CAPABILITY


def pack(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Pack u8 [N, K] and scales f32 [N, G] as i16 [N, blocks, 64], whose words hold two columns of a block that are 64
    apart, and f32 [G, N]. On a device without 8-bit floats, return bf16 instead.
    """
    num_rows, width = weight.shape
    if not are_multiplied():
        return to_bf16(weight, scale), scale
    filled = functional.pad(weight, (0, -width % FP8_BLOCK)).view(num_rows, -1, 2, FP8_BLOCK // 2)
    return filled.transpose(2, 3).contiguous().view(torch.int16).squeeze(3), scale.t().contiguous()


PACKED_BY = {"linear_fp8": pack}  # by op


def to_bf16(weight: Tensor, scale: Tensor) -> Tensor:
    values = weight.view(torch.float8_e4m3fn).float()
    each = scale if scale.shape[1] == 1 else scale.repeat_interleave(FP8_BLOCK, 1)[:, : weight.shape[1]]
    return (values * each).to(torch.bfloat16)


def linear_fp8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, is_gated: bool = False
) -> Tensor:
    """Multiply x [T, K] with the packed weight. Return [T, N]; with `is_gated`, the `swiglu` of it."""
    if weight.dim() == 2:
        y = linear(x, weight.to(x.dtype), bias)
        return swiglu(y) if is_gated else y
    num_rows = len(x)
    if num_rows > MAX_PACKED_ROWS:
        y = functional.linear(_rounded(x).to(x.dtype), _dequantize(weight, scale, x), bias)
        return swiglu(y) if is_gated else y
    if num_rows <= MAX_SKINNY_ROWS:
        out = x.new_empty(num_rows, len(weight) // (1 + is_gated))
        if num_rows:
            _skinny_gemm(x, (weight, scale, bias), out, is_gated=is_gated)
        return out
    both, x_scale = high_and_low(x, weight.shape[1])
    if len(scale) == 1 and len(weight) % ALIGNED == 0 and not INTERPRETED:
        return _high_low_cublas(
            both, x_scale, (weight, scale, bias), x.new_empty(num_rows, len(weight) // (1 + is_gated))
        )
    out = x.new_empty(num_rows, len(weight))
    _high_low_gemm(both, x_scale, (weight, scale, bias), out)
    return swiglu(out) if is_gated else out


gated_linear_fp8 = functools.partial(linear_fp8, is_gated=True)


def skinny_tile(num_weights: int, is_blocked: bool) -> Fp8SkinnyTile:
    """Return the fastest tile on an H200."""
    if num_weights > WIDE:
        return Fp8SkinnyTile(4, 32, 16, 4, 3)
    if num_weights > NARROW:
        return Fp8SkinnyTile(4, 16, 0, 4, 5)
    return Fp8SkinnyTile(8, 16, 16, 8, 4) if is_blocked else Fp8SkinnyTile(4, 16, 16, 4, 6)


def high_low_tile(num_rows: int, columns: int) -> HighLowTile:
    if num_rows <= 64:
        return HighLowTile(64, 64, 4, 4)
    return HighLowTile(128, 128, 8, 4) if columns > NARROW else HighLowTile(64, 128, 4, 4)


def num_splits(num_programs: int, num_blocks: int) -> int:
    """Return the number of splits of the columns that keeps the device busy. It is a power of two, so that few kernels
    are compiled.
    """
    return 1 << max(1, min(PROGRAMS // num_programs, num_blocks // MIN_BLOCKS, 8)).bit_length() - 1


def _rounded(x: Tensor) -> Tensor:
    """Round to bf16, because the interpreter computes bf16 in float32."""
    rounded = x.to(torch.bfloat16)
    return rounded.float() if INTERPRETED else rounded


def _skinny_gemm(x: Tensor, stored: tuple[Tensor, Tensor, Tensor | None], out: Tensor, *, is_gated: bool) -> None:
    weight, scale, bias = stored
    if len(x) == 1:
        fp8_gemv.multiply(_rounded(x), weight, scale, bias, out, is_gated=is_gated)
        return
    (num_rows, columns), num_blocks = out.shape, weight.shape[1]
    tile = skinny_tile(len(weight), len(scale) > 1)
    is_even = num_blocks * FP8_BLOCK == x.shape[1] and num_blocks % tile.slices == 0
    skinny_gemm[(cdiv(len(weight), tile.rows),)](
        _rounded(x), weight, scale, scale if bias is None else bias, out, num_rows, columns, x.shape[1], num_blocks,
        len(scale) > 1, bias is not None, is_gated, is_even, tile.slices, tile.rows, 8 if num_rows <= 8 else 16,
        tile.lines, num_warps=tile.num_warps, num_stages=tile.num_stages, **PDL,
    )  # fmt: skip


def high_and_low(x: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Split x into 8-bit floats [2, T, K'] in the order of packed words, the nearest ones and the remainders, and their
    scales f32 [T].
    """
    num_rows, width = x.shape
    both = x.new_empty(2, num_rows, FP8_BLOCK * num_blocks, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(num_rows, dtype=torch.float32)
    blocks = next_power_of_2(num_blocks)
    warps = 4 if blocks <= 32 else 16
    split_high_low[(num_rows,)](x, both, scale, width, num_blocks, blocks, num_warps=warps, **PDL)
    return both, scale


def _high_low_cublas(
    both: Tensor, x_scale: Tensor, stored: tuple[Tensor, Tensor, Tensor | None], out: Tensor
) -> Tensor:
    weight, scale, bias = stored
    numbers, one = weight.view(torch.float8_e4m3fn).flatten(1), _one(out.device)
    products = torch._scaled_mm(both.flatten(0, 1), numbers.t(), one, one, out_dtype=torch.bfloat16)
    num_rows, columns = out.shape
    add_high_low[(num_rows, cdiv(columns, JOINED))](
        products, x_scale, scale, scale if bias is None else bias, out, num_rows, columns,
        bias is not None, columns < len(weight), JOINED, **PDL,
    )  # fmt: skip
    return out


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def _high_low_gemm(both: Tensor, x_scale: Tensor, stored: tuple[Tensor, Tensor, Tensor | None], out: Tensor) -> None:
    weight, scale, bias = stored
    (num_rows, columns), num_blocks = out.shape, weight.shape[1]
    tile = high_low_tile(num_rows, columns)
    numbers = weight.view(torch.float8_e4m3fn).flatten(1)
    if HAS_COPY_ENGINE and not INTERPRETED:
        given = (
            TensorDescriptor.from_tensor(both.flatten(0, 1), [tile.rows, FP8_BLOCK]),
            TensorDescriptor.from_tensor(numbers, [tile.columns, FP8_BLOCK]),
        )
    else:
        given = both, numbers
    down, across = cdiv(num_rows, tile.rows), cdiv(columns, tile.columns)
    splits = num_splits(down * across, num_blocks)
    sums = out if splits == 1 else out.new_empty(splits, num_rows, columns, dtype=torch.float32)
    high_low_gemm[(down, across, splits)](
        given[0], x_scale, given[1], scale, scale if bias is None else bias, sums, num_rows, columns, num_blocks,
        len(scale) > 1, bias is not None, not isinstance(given[0], Tensor), tile.rows, tile.columns, splits,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **PDL,
    )  # fmt: skip
    if splits > 1:
        add_splits(sums, out)


def _dequantize(weight: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """Return the weight [N, K] in the type of x."""
    out = x.new_empty(len(weight), x.shape[1])
    grid = cdiv(len(weight), WIDENED), weight.shape[1]
    dequantize[grid](weight, scale, out, *out.shape, len(scale) > 1, WIDENED, **PDL)
    return out
