"""Quantization of activations to 8-bit floats (e4m3), alone or as the last part of the op that computes them.

A row has one scale, or one for each block of 128 columns, as the weights that it is multiplied with. A scale is the
largest magnitude divided by 448, and a code is the quotient rounded to nearest, ties to even. Columns are stored in the
order of packed weights (fp8.py): in each block, columns that are 64 apart are neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.dtypes import FP8_BLOCK
from engine.ops.cuda.fp8_kernels import to_fp8
from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, next_power_of_2, wait_for_inputs


class Fp8Rows(NamedTuple):
    """Quantized activations of T tokens."""

    numbers: Tensor  # e4m3 [T, blocks * 128], padded with zeros
    scale: Tensor  # f32 [1 or blocks, T]
    dtype: torch.dtype  # of the activations before

    @classmethod
    def empty(cls, like: Tensor, num_rows: int, width: int, *, is_blocked: bool) -> Fp8Rows:
        """Return uninitialized rows of `width` columns on the device and in place of activations like `like`."""
        num_blocks = cdiv(width, FP8_BLOCK)
        numbers = like.new_empty(num_rows, num_blocks * FP8_BLOCK, dtype=torch.float8_e4m3fn)
        scale = like.new_empty(num_blocks if is_blocked else 1, num_rows, dtype=torch.float32)
        return cls(numbers, scale, like.dtype)


def quantize(x: Tensor, *, is_blocked: bool) -> Fp8Rows:
    """Quantize the rows of x [T, K], with a scale for each row or, if `is_blocked`, for each 128 columns of a row."""
    rows = Fp8Rows.empty(x, *x.shape, is_blocked=is_blocked)
    if len(x):
        num_blocks = rows.numbers.shape[1] // FP8_BLOCK
        _quantize[(len(x),)](
            x, rows.numbers, rows.scale, x.shape[1], num_blocks, is_blocked, next_power_of_2(num_blocks),
            num_warps=4, **PDL,
        )  # fmt: skip
    return rows


@kernel
def _quantize(x, numbers, scale, width, num_blocks, IS_BLOCKED: tl.constexpr, BLOCKS: tl.constexpr):
    begin_next()
    wait_for_inputs()
    k = columns_of(BLOCKS)
    at = x + tl.program_id(0).to(tl.int64) * width + k
    left = tl.load(at, mask=k < width, other=0).to(tl.float32)
    right = tl.load(at + 64, mask=k + 64 < width, other=0).to(tl.float32)
    store_quantized(left, right, numbers, scale, num_blocks, IS_BLOCKED, BLOCKS)


@triton.jit
def columns_of(BLOCKS: tl.constexpr):
    """Return the columns [BLOCKS, 64] of the first halves of blocks; those of the second halves are 64 further."""
    return tl.arange(0, BLOCKS)[:, None] * 128 + tl.arange(0, 64)[None, :]


@triton.jit
def store_quantized(left, right, numbers, scale, num_blocks, IS_BLOCKED: tl.constexpr, BLOCKS: tl.constexpr):
    """Quantize the row of this program, given as the halves [BLOCKS, 64] of its blocks, and store it."""
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    largest = tl.max(tl.maximum(tl.abs(left), tl.abs(right)), 1, keep_dims=True)
    is_nan = tl.sum((left + right) * 0, 1, keep_dims=True)  # zero, or NaN where the result has to be NaN
    if not IS_BLOCKED:
        largest, is_nan = tl.max(largest, 0, keep_dims=True), tl.sum(is_nan, 0, keep_dims=True)
    step = tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))
    divisor = tl.broadcast_to(tl.where(step == 0, 1.0, step), (BLOCKS, 64))
    codes = to_fp8(tl.clamp(tl.interleave(tl.div_rn(left, divisor), tl.div_rn(right, divisor)), -448.0, 448.0))
    block = tl.arange(0, BLOCKS)[:, None]
    at = (row * num_blocks + block) * 128 + tl.arange(0, 128)[None, :]
    tl.store(numbers + at, codes, mask=block < num_blocks)
    group = block if IS_BLOCKED else tl.zeros([1, 1], tl.int32)
    tl.store(scale + group.to(tl.int64) * num_rows + row, step + is_nan, mask=group < num_blocks)
