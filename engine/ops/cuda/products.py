"""Matrix products. One row goes through a kernel of our own, which reads the weights as fast as they come, and a few
through another (skinny_gemm.py); more go through torch (cuBLASLt), which such kernels only equal."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from engine.ops.cuda import skinny_gemm
from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, next_power_of_2, wait_for_inputs
from engine.ops.cuda.one_shot_all_reduce import CAPACITY, PeerBuffers, ranks_of, recipients, send_columns
from engine.ops.cuda.pointwise import add, swiglu

# Up to so many columns: the rows of weights of a program, and columns at a time. As measured on an H200 in the shapes
# of a model and of its shares on two and four GPUs: few programs need much to read each, many are best small.
TILES = (2048, 4, 2048), (4095, 4, 1024), (4096, 8, 1024), (10239, 8, 512)
SMALL = 2, 2048  # for more columns and where there are two rows of weights for each


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, to: PeerBuffers | None = None) -> Tensor:
    """Multiply x [T, K] with weight [N, K]. Return [T, N] in the type of both. A single row is also sent to the ranks
    of `to`."""
    if len(x) == 1:
        return _gemv(x, weight, bias, x.new_empty(1, len(weight)), to=to)
    if skinny_gemm.are_few(x):
        return skinny_gemm.multiply(x, weight, bias, x.new_empty(len(x), len(weight)))
    return functional.linear(x, weight, bias)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, to: PeerBuffers | None = None) -> Tensor:
    """Compute `linear`, then `add` with z [T, N]. Without a bias, the kernel of a single row adds z to its sums, and
    sends the row to the ranks of `to`."""
    if len(x) == 1 and bias is None:
        return _gemv(x, weight, z, x.new_empty(1, len(weight)), to=to)
    return add(linear(x, weight, bias), z)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `linear`, then `swiglu`: [T, K], [2 F, K] -> [T, F]."""
    if len(x) == 1:
        return _gemv(x, weight, bias, x.new_empty(1, len(weight) // 2), is_gated=True)
    if skinny_gemm.are_few(x):
        return skinny_gemm.multiply(x, weight, bias, x.new_empty(len(x), len(weight) // 2), is_gated=True)
    return swiglu(functional.linear(x, weight, bias))


def logits(x: Tensor, weight: Tensor, bias: None = None) -> Tensor:
    """Compute the last linear layer of a graph, whose sums stay float32: [S, K], [V, K] -> f32 [S, V]."""
    if len(x) == 1:
        return _gemv(x, weight, None, x.new_empty(1, len(weight), dtype=torch.float32))
    if x.dtype == torch.float32:
        return functional.linear(x, weight)
    if skinny_gemm.are_few(x):
        return skinny_gemm.multiply(x, weight, None, x.new_empty(len(x), len(weight), dtype=torch.float32))
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def gather_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return the given rows of x, or all of them without `rows`."""
    return x if rows is None else x.index_select(0, rows)


def _gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    is_gated: bool = False,
    to: PeerBuffers | None = None,
) -> Tensor:
    columns, width = out.shape[1], x.shape[1]
    block_n, block_k = next((tile for most, *tile in TILES if columns <= most and not is_gated), SMALL)
    block_k = min(block_k, next_power_of_2(width))
    _multiply[(cdiv(columns, block_n),)](
        x, weight, x if bias is None else bias, out, *recipients(to, x), columns, width, bias is not None, is_gated,
        block_n, block_k, *ranks_of(to), CAPACITY, num_warps=4, **PDL,
    )  # fmt: skip
    return out


@kernel
def _multiply(
    x, weight, bias, out, addresses, calls, columns, width, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs; with IS_GATED, those of the gate and as many gated values, whose rows of weights follow
    all of the gate's.
    """
    begin_next()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = weight + n.to(tl.int64)[:, None] * width + k[None, :]
    up_rows = rows + tl.cast(columns, tl.int64) * width if IS_GATED else rows
    is_row = (n < columns)[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
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
    if NUM_RANKS > 1:
        is_bf16: tl.constexpr = out.dtype.element_ty == tl.bfloat16
        send_columns(y, tl.program_id(0) * BLOCK_N, columns, addresses, calls, RANK, NUM_RANKS, CAPACITY, is_bf16)
    tl.store(out + n, y, mask=n < columns)
