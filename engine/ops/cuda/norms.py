"""Norms, one program a row."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, kernel, next_power_of_2, wait_for_inputs


def rms_norm(x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + epsilon) * weight; x [T, H], weight f32 [H]."""
    y = torch.empty_like(x)
    _launch(x, x, weight, y, epsilon, has_residual=False)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual in place and return the norm of the sum. After the first sum a residual of float16 is
    float32, because it can be larger than anything that is added to it.
    """
    if residual.dtype == torch.float16:
        residual = residual.float()
    y = torch.empty_like(x)
    _launch(x, residual, weight, y, epsilon, has_residual=True)
    return y, residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, epsilon: float) -> Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias; x [T, H], weight and bias f32 [H]."""
    num_rows, width = x.shape
    y = torch.empty_like(x)
    if num_rows:
        block = next_power_of_2(width)
        given = x, weight, weight if bias is None else bias, y, width, epsilon
        _layer_norm[(num_rows,)](*given, bias is not None, block, num_warps=_warps(block), **PDL)
    return y


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 4096 else 16


def square_sums(qkv: Tensor, *, num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Return the sums of squares of the query part and of the key part: f32 [T, 2]."""
    sums = qkv.new_empty(len(qkv), 2, dtype=torch.float32)
    if len(qkv):
        sizes = num_heads * head_dim, num_kv_heads * head_dim
        block = next_power_of_2(max(sizes))
        _square_sums[(len(qkv), 2)](qkv, sums, *sizes, qkv.shape[1], block, num_warps=_warps(block), **PDL)
    return sums


def wide_norm(
    qkv: Tensor,
    sums: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_size: int,
    k_size: int,
    epsilon: float,
) -> Tensor:
    """Normalize the query part and the key part of `qkv`, each by the sum of squares over all ranks, and copy the
    values.
    """
    y = torch.empty_like(qkv)
    if len(qkv):
        ends = num_heads * head_dim, (num_heads + num_kv_heads) * head_dim
        block = next_power_of_2(qkv.shape[1])
        _wide_norm[(len(qkv),)](
            qkv, sums, q_weight, k_weight, y, *ends, qkv.shape[1], q_size, k_size, epsilon, block,
            num_warps=_warps(block), **PDL,
        )  # fmt: skip
    return y


def _launch(x: Tensor, residual: Tensor, weight: Tensor, y: Tensor, epsilon: float, *, has_residual: bool) -> None:
    num_rows, width = x.shape
    if num_rows:
        block = next_power_of_2(width)
        given = x, residual, weight, y, width, epsilon
        _rms_norm[(num_rows,)](*given, has_residual, block, num_warps=_warps(block), **PDL)


@kernel
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


@kernel
def _square_sums(qkv, sums, q_width, k_width, width, BLOCK: tl.constexpr):
    begin_next()
    wait_for_inputs()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    count = tl.where(part == 0, q_width, k_width)
    at = qkv + row * width + part * q_width + columns
    values = tl.load(at, mask=columns < count, other=0).to(tl.float32)
    tl.store(sums + row * 2 + part, tl.sum(values * values, 0))


@kernel
def _wide_norm(
    qkv, sums, q_weight, k_weight, y, q_end, k_end, width, q_size, k_size, epsilon, BLOCK: tl.constexpr
):  # fmt: skip
    begin_next()
    wait_for_inputs()
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_query, is_key = columns < q_end, (columns >= q_end) & (columns < k_end)
    values = tl.load(qkv + row * width + columns, mask=columns < width, other=0).to(tl.float32)
    q_scale = 1 / tl.sqrt(tl.load(sums + row * 2) / q_size + epsilon)
    k_scale = 1 / tl.sqrt(tl.load(sums + row * 2 + 1) / k_size + epsilon)
    weights = tl.load(q_weight + columns, mask=is_query, other=0) + tl.load(
        k_weight + columns - q_end, mask=is_key, other=0
    )
    normed = values * tl.where(is_query, q_scale, k_scale) * weights
    tl.store(y + row * width + columns, tl.where(is_query | is_key, normed, values), mask=columns < width)


@kernel
def _layer_norm(x, weight, bias, y, width, epsilon, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    begin_next()
    columns = tl.arange(0, BLOCK)
    is_in = columns < width
    weights = tl.load(weight + columns, mask=is_in, other=0)
    wait_for_inputs()
    at = tl.program_id(0).to(tl.int64) * width + columns
    values = tl.load(x + at, mask=is_in, other=0).to(tl.float32)
    centered = tl.where(is_in, values - tl.sum(values, 0) / width, 0.0)
    normed = centered * (1 / tl.sqrt(tl.sum(centered * centered, 0) / width + epsilon)) * weights
    if HAS_BIAS:
        normed += tl.load(bias + columns, mask=is_in, other=0)
    tl.store(y + at, normed, mask=is_in)
