"""Matrix products of 8-bit floats whose rows do not depend on one another: every number of rows is quantized, and each
output is one sum over the blocks of 128 inputs, from the first to the last, in float32."""

from __future__ import annotations

import functools

from torch import Tensor

from engine.ops.cuda.fp8_activations import quantize
from engine.ops.cuda.fp8_gemm import Fp8GemmTile, Weights, gemm
from engine.ops.cuda.invariant.products import linear
from engine.ops.cuda.pointwise import swiglu

NARROW, WIDE = 5120, 12288  # columns: how many tiles there are decides how large each may be


def linear_a8w8_fp8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, is_gated: bool = False
) -> Tensor:
    """Multiply x [T, K] by the packed weight: [T, N]; gated: with the `swiglu` of it."""
    if weight.dim() == 2:
        y = linear(x, weight.to(x.dtype), bias)
    else:
        y = x.new_empty(len(x), len(weight))
        rows = quantize(x, is_blocked=len(scale) > 1)
        gemm(rows, Weights(weight, scale, bias), y, tile_for(len(x), len(weight)))
    return swiglu(y) if is_gated else y


gated_linear_a8w8_fp8 = functools.partial(linear_a8w8_fp8, is_gated=True)


def tile_for(num_rows: int, columns: int) -> Fp8GemmTile:
    """Return the fastest tile without splits; every one gives the same bits."""
    if num_rows > 64:
        return Fp8GemmTile(128, 128, 8, 4) if columns > NARROW or num_rows > 256 else Fp8GemmTile(128, 64, 4, 4)
    return (
        Fp8GemmTile(64, 32, 4, 7)
        if columns <= NARROW
        else Fp8GemmTile(64, 64, 4, 6)
        if columns <= WIDE
        else Fp8GemmTile(64, 128, 4, 5)
    )
