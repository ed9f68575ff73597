"""Matrix products of quantized activations and weights on the tensor cores for 8-bit floats.

One kernel in the Triton language serves all numbers of rows, with tiles that are chosen for Hopper. It reads its tiles
with the copy engine (TMA) where the device has one. Independent of how weights and activations were quantized.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.dtypes import FP8_BLOCK
from engine.ops.cuda.fp8_activations import Fp8Rows
from engine.ops.cuda.launch import HAS_COPY_ENGINE, INTERPRETED, PDL, begin_next, cdiv, kernel, num_sms, wait_for_inputs
from engine.ops.cuda.lowbit_kernels import add_splits

GROUP_SIZE_M = 8  # tiles of rows that go over the same weights at a time, so that the L2 cache serves them


class Weights(NamedTuple):
    """A packed matrix (fp8.py) and its bias."""

    words: Tensor  # i16 [N, blocks, 64]
    scale: Tensor  # f32 [1 or blocks, N]
    bias: Tensor | None

    @property
    def numbers(self) -> Tensor:
        """Return the elements as 8-bit floats [N, blocks * 128], in packed order."""
        return self.words.view(torch.float8_e4m3fn).flatten(1)


class Fp8GemmTile(NamedTuple):
    """Work of a program of the kernel."""

    rows: int
    columns: int
    warps: int
    stages: int  # tiles that are read ahead, plus one
    is_persistent: bool = False  # as many programs as multiprocessors, each with several tiles
    is_exact: bool = True  # sums of more than 128 products are float32, not the shorter sums of the tensor cores
    splits: int = 1  # shares of the inputs that are summed apart


def gemm(x: Fp8Rows, weights: Weights, out: Tensor, tile: Fp8GemmTile) -> None:
    """Multiply x [T, K] by the weights [N, K] and store the product and bias in `out` [T, N]."""
    num_rows, columns = out.shape
    if not num_rows:
        return
    numbers, num_blocks = weights.numbers, weights.words.shape[1]
    is_copied = HAS_COPY_ENGINE and not INTERPRETED
    given = x.numbers, numbers
    if is_copied:
        given = (
            TensorDescriptor.from_tensor(x.numbers, [tile.rows, FP8_BLOCK]),
            TensorDescriptor.from_tensor(numbers, [tile.columns, FP8_BLOCK]),
        )
    num_tiles = cdiv(num_rows, tile.rows) * cdiv(columns, tile.columns)
    sums = out if tile.splits == 1 else out.new_empty(tile.splits, num_rows, columns, dtype=x.scale.dtype)
    bias = weights.scale if weights.bias is None else weights.bias
    is_blocked, has_bias = len(weights.scale) > 1, weights.bias is not None
    _multiply[(min(num_tiles, num_sms()) if tile.is_persistent else num_tiles, tile.splits)](
        given[0], x.scale, given[1], weights.scale, bias, sums, num_rows, columns, num_blocks,
        is_blocked, has_bias, is_copied, is_blocked or tile.is_exact, tile.is_persistent,
        tile.rows, tile.columns, tile.splits, GROUP_SIZE_M, num_warps=tile.warps, num_stages=tile.stages, **PDL,
    )  # fmt: skip
    if tile.splits > 1:
        add_splits(sums, out)


def scaled_mm(x: Fp8Rows, weights: Weights, *, is_fast: bool) -> Tensor:
    """Multiply by cuBLASLt: bf16 [T, N]. Rows need one scale each, and N has to be a multiple of 16."""
    return torch._scaled_mm(
        x.numbers, weights.numbers.t(), x.scale.t(), weights.scale, out_dtype=torch.bfloat16, use_fast_accum=is_fast
    )


@kernel
def _multiply(
    x, x_scale, weight, scale, bias, out, num_rows, columns, num_blocks,
    IS_BLOCKED: tl.constexpr, HAS_BIAS: tl.constexpr, IS_COPIED: tl.constexpr, IS_EXACT: tl.constexpr,
    IS_PERSISTENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):  # fmt: skip
    """Compute ROWS x COLUMNS outputs, or a share of their sums; with IS_PERSISTENT, several such tiles. IS_COPIED says
    that `x` and `weight` are tensor descriptors.
    """
    begin_next()
    wait_for_inputs()
    split = tl.program_id(1)
    each = tl.cdiv(num_blocks, SPLITS)
    first_block, end_block = split * each, tl.minimum(split * each + each, num_blocks)
    start = tl.program_id(0)
    if IS_PERSISTENT:
        num_tiles = tl.cdiv(num_rows, ROWS) * tl.cdiv(columns, COLUMNS)
        finished = start - tl.num_programs(0)  # counts apart, so that a tile can be stored while the next is read
        for tile in tl.range(start, num_tiles, tl.num_programs(0), flatten=True):
            first_row, first_column = _place(tile, num_rows, columns, ROWS, COLUMNS, GROUP_SIZE_M)
            sums = _sums(
                x, x_scale, weight, scale, first_row, first_column, first_block, end_block, num_rows, columns,
                num_blocks, IS_BLOCKED, IS_COPIED, IS_EXACT, ROWS, COLUMNS,
            )  # fmt: skip
            finished += tl.num_programs(0)
            first_row, first_column = _place(finished, num_rows, columns, ROWS, COLUMNS, GROUP_SIZE_M)
            _store(
                sums, x_scale, scale, bias, out, first_row, first_column, split, num_rows, columns,
                IS_BLOCKED, HAS_BIAS, ROWS, COLUMNS,
            )  # fmt: skip
    else:
        first_row, first_column = _place(start, num_rows, columns, ROWS, COLUMNS, GROUP_SIZE_M)
        sums = _sums(
            x, x_scale, weight, scale, first_row, first_column, first_block, end_block, num_rows, columns, num_blocks,
            IS_BLOCKED, IS_COPIED, IS_EXACT, ROWS, COLUMNS,
        )  # fmt: skip
        _store(
            sums, x_scale, scale, bias, out, first_row, first_column, split, num_rows, columns,
            IS_BLOCKED, HAS_BIAS, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit
def _place(tile, num_rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP_SIZE_M: tl.constexpr):
    """Return the first row and column of a tile: GROUP_SIZE_M tiles of rows go over the columns side by side."""
    num_columns = tl.cdiv(columns, COLUMNS)
    first = tile // (GROUP_SIZE_M * num_columns) * GROUP_SIZE_M
    size = tl.minimum(tl.cdiv(num_rows, ROWS) - first, GROUP_SIZE_M)
    index = tile % (GROUP_SIZE_M * num_columns)
    return (first + index % size) * ROWS, index // size * COLUMNS


@triton.jit
def _sums(
    x, x_scale, weight, scale, first_row, first_column, first_block, end_block, num_rows, columns, num_blocks,
    IS_BLOCKED: tl.constexpr, IS_COPIED: tl.constexpr, IS_EXACT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    m, n = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    is_row, is_column = m < num_rows, n < columns
    i = tl.arange(0, 128)[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(first_block, end_block):
        if IS_COPIED:
            rows, weights = x.load([first_row, block * 128]), weight.load([first_column, block * 128])
        else:
            at = (m.to(tl.int64) * num_blocks + block)[:, None] * 128 + i
            rows = tl.load(x + at, mask=is_row[:, None], other=0.0)
            at = (n.to(tl.int64) * num_blocks + block)[:, None] * 128 + i
            weights = tl.load(weight + at, mask=is_column[:, None], other=0.0)
        if IS_BLOCKED:
            group = tl.cast(block, tl.int64)
            of_rows = tl.load(x_scale + group * num_rows + m, mask=is_row, other=0)
            of_columns = tl.load(scale + group * columns + n, mask=is_column, other=0)
            sums += tl.dot(rows, tl.trans(weights)) * of_rows[:, None] * of_columns[None, :]
        elif IS_EXACT:
            sums += tl.dot(rows, tl.trans(weights))
        else:
            sums = tl.dot(rows, tl.trans(weights), sums)
    return sums


@triton.jit
def _store(
    sums, x_scale, scale, bias, out, first_row, first_column, split, num_rows, columns,
    IS_BLOCKED: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    m, n = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    is_row, is_column = m < num_rows, n < columns
    if not IS_BLOCKED:
        sums *= tl.load(x_scale + m, mask=is_row, other=0)[:, None]
        sums *= tl.load(scale + n, mask=is_column, other=0)[None, :]
    if HAS_BIAS:
        if split == 0:
            sums += tl.load(bias + n, mask=is_column, other=0).to(tl.float32)[None, :]
    at = (split.to(tl.int64) * num_rows + m)[:, None] * columns + n[None, :]
    tl.store(out + at, sums, mask=is_row[:, None] & is_column[None, :])
