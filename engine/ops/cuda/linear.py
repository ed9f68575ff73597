"""Matrix products. Few rows go through kernels of our own, which do nothing but read the weights as fast as they come;
more go through torch (cuBLASLt)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from engine.ops.cuda.launch import PDL, begin_next, wait_for_inputs
from engine.ops.cuda.pointwise import swiglu

MOST_ROWS = 16  # beyond, cuBLAS is faster


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times weight [N, K]: [T, N] in the type of x, which is the weight's."""
    if 0 < len(x) <= MOST_ROWS:
        return _few_rows(x, weight, bias, x.new_empty(len(x), len(weight)))
    return functional.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, then `swiglu`: [T, K], [2 F, K] -> [T, F]."""
    if 0 < len(x) <= MOST_ROWS:
        return _few_rows(x, weight, bias, x.new_empty(len(x), len(weight) // 2), is_gated=True)
    return swiglu(functional.linear(x, weight, bias))


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` for the last one of a graph: its sums stay float32. [S, K], [V, K] -> f32 [S, V]."""
    if 0 < len(x) <= MOST_ROWS:
        return _few_rows(x, weight, None, x.new_empty(len(x), len(weight), dtype=torch.float32))
    if x.dtype == torch.float32:
        return functional.linear(x, weight)
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows)


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, is_gated: bool = False) -> Tensor:
    num_rows, width = x.shape
    columns = out.shape[1]
    kernel = _one_row if num_rows == 1 else _some_rows
    block_n, block_k, warps, stages = _shape_of(num_rows, columns, width)
    kernel[(triton.cdiv(columns, block_n),)](
        x, weight, x if bias is None else bias, out, num_rows, columns, width, bias is not None, is_gated, block_n,
        block_k, num_warps=warps, num_stages=stages, **PDL,
    )  # fmt: skip
    return out


def _shape_of(num_rows: int, columns: int, width: int) -> tuple[int, int, int, int]:
    """Outputs of a program, inputs at a time, warps, stages."""
    if num_rows == 1:
        return (8, 1024, 4, 3)
    return (16, 256, 4, 4)


@triton.jit
def _one_row(
    x, weight, bias, out, num_rows, columns, width, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    begin_next()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = weight + n.to(tl.int64)[:, None] * width + k[None, :]
    is_row = (n < columns)[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_rows = rows + tl.cast(columns, tl.int64) * width if IS_GATED else rows
    # Weights are read a round ahead, the first before the inputs are there.
    mask = is_row & (k < width)[None, :]
    ahead = tl.load(rows, mask=mask, other=0)
    up_ahead = tl.load(up_rows, mask=mask, other=0) if IS_GATED else ahead
    wait_for_inputs()
    for start in range(0, width, BLOCK_K):
        matrix, up = ahead, up_ahead
        values = tl.load(x + start + k, mask=start + k < width, other=0).to(tl.float32)[None, :]
        following = start + BLOCK_K
        mask = is_row & (following + k < width)[None, :]
        ahead = tl.load(rows + following, mask=mask, other=0)
        sums += matrix.to(tl.float32) * values
        if IS_GATED:
            up_ahead = tl.load(up_rows + following, mask=mask, other=0)
            up_sums += up.to(tl.float32) * values
    y = tl.sum(sums, 1)
    if HAS_BIAS:
        y += tl.load(bias + n, mask=n < columns, other=0).to(tl.float32)
    if IS_GATED:
        up_y = tl.sum(up_sums, 1)
        if HAS_BIAS:
            up_y += tl.load(bias + columns + n, mask=n < columns, other=0).to(tl.float32)
        y = y / (1 + tl.exp(-y)) * up_y
    tl.store(out + n, y, mask=n < columns)


@triton.jit
def _some_rows(
    x, weight, bias, out, num_rows, columns, width, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    begin_next()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, 16)
    k = tl.arange(0, BLOCK_K)
    rows = weight + n.to(tl.int64)[:, None] * width + k[None, :]
    is_row = (n < columns)[:, None]
    sums = tl.zeros([BLOCK_N, 16], tl.float32)
    up_sums = tl.zeros([BLOCK_N, 16], tl.float32)
    wait_for_inputs()
    for start in range(0, width, BLOCK_K):
        is_in = (start + k < width)[None, :]
        values = tl.load(x + m[:, None] * width + start + k[None, :], mask=(m < num_rows)[:, None] & is_in, other=0)
        values = tl.trans(values)
        matrix = tl.load(rows + start, mask=is_row & is_in, other=0)
        sums = tl.dot(matrix, values, sums, input_precision="ieee")
        if IS_GATED:
            matrix = tl.load(rows + tl.cast(columns, tl.int64) * width + start, mask=is_row & is_in, other=0)
            up_sums = tl.dot(matrix, values, up_sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < columns, other=0).to(tl.float32)[:, None]
    if IS_GATED:
        if HAS_BIAS:
            up_sums += tl.load(bias + columns + n, mask=n < columns, other=0).to(tl.float32)[:, None]
        sums = sums / (1 + tl.exp(-sums)) * up_sums
    tl.store(out + m[None, :] * columns + n[:, None], sums, mask=is_row & (m < num_rows)[None, :])
