"""Matrix products of 8-bit floats with activations that are rounded to 8-bit floats as well.

Up to 64 rows the time is that of reading the weights, and activations keep their bits (fp8.py). More rows are quantized
and multiplied on the tensor cores for 8-bit floats. With a scale for each 128 x 128 weights that is faster only up to
512 rows, above which weights are converted to bf16 for cuBLAS.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from engine.ops.cuda import fp8
from engine.ops.cuda.fp8_activations import quantize
from engine.ops.cuda.fp8_gemm import Fp8GemmTile, Weights, gemm, scaled_mm
from engine.ops.cuda.launch import INTERPRETED
from engine.ops.cuda.pointwise import swiglu

MAX_SKINNY_ROWS = 64  # rows up to which activations keep their bits
MAX_BLOCKED_ROWS = (
    fp8.MAX_PACKED_ROWS
)  # rows above which they keep their bits, too, if each block of weights has a scale
ALIGNED = 16  # columns, for torch's product
NARROW = 5120  # columns: how many tiles there are decides how large each may be

PACKED_BY = {"linear_a8w8_fp8": fp8.pack}  # by op


def linear_a8w8_fp8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, is_gated: bool = False
) -> Tensor:
    """Multiply x [T, K] by the packed weight: [T, N]; gated: with the `swiglu` of it."""
    if weight.dim() == 2 or len(x) <= MAX_SKINNY_ROWS or (len(scale) > 1 and len(x) > MAX_BLOCKED_ROWS):
        return fp8.linear_fp8(x, weight, scale, bias, is_gated=is_gated)
    y = multiply(x, Weights(weight, scale, bias))
    return swiglu(y) if is_gated else y


gated_linear_a8w8_fp8 = functools.partial(linear_a8w8_fp8, is_gated=True)


def multiply(x: Tensor, weights: Weights) -> Tensor:
    """Quantize x [T, K] and multiply: [T, N] in the type of x."""
    is_blocked, columns = len(weights.scale) > 1, len(weights.words)
    rows = quantize(x, is_blocked=is_blocked)
    if not is_blocked and columns % ALIGNED == 0 and x.dtype == torch.bfloat16 and not INTERPRETED:
        y = scaled_mm(rows, weights, is_fast=True)
        return y if weights.bias is None else y.add_(weights.bias)
    out = x.new_empty(len(x), columns)
    gemm(
        rows,
        weights,
        out,
        Fp8GemmTile(64, 128, 4, 4) if is_blocked or columns <= NARROW else Fp8GemmTile(128, 128, 8, 4),
    )
    return out
