"""RMS norms, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, wait_for_inputs


def rms_norm(x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + epsilon) * weight; x [T, H], weight f32 [H]."""
    y = torch.empty_like(x)
    _launch(x, x, weight, y, epsilon, has_residual=False)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """residual += x in place, and its norm. From the first sum on a residual of float16 is float32: it can be larger
    than anything that is added to it."""
    if residual.dtype == torch.float16:
        residual = residual.float()
    y = torch.empty_like(x)
    _launch(x, residual, weight, y, epsilon, has_residual=True)
    return y, residual


def _launch(x: Tensor, residual: Tensor, weight: Tensor, y: Tensor, epsilon: float, *, has_residual: bool) -> None:
    num_rows, width = x.shape
    if num_rows:
        block = triton.next_power_of_2(width)
        warps = 4 if block <= 2048 else 8 if block <= 4096 else 16
        _rms_norm[(num_rows,)](x, residual, weight, y, width, epsilon, has_residual, block, num_warps=warps, **PDL)


@triton.jit
def _rms_norm(x, residual, weight, y, width, epsilon, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    begin_next()
    columns = tl.arange(0, BLOCK)
    is_in = columns < width
    weights = tl.load(weight + columns, mask=is_in, other=0)
    wait_for_inputs()
    at = tl.program_id(0).to(tl.int64) * width + columns
    values = tl.load(x + at, mask=is_in, other=0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + at, mask=is_in, other=0).to(tl.float32)
        tl.store(residual + at, values, mask=is_in)
    scale = 1 / tl.sqrt(tl.sum(values * values, 0) / width + epsilon)
    tl.store(y + at, values * scale * weights, mask=is_in)
