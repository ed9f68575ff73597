"""Matrix products whose every output is one chain of sums, over k from the first to the last.

A tensor core adds 16 products to what it is given, in an order of its own that depends on neither row nor column; the
chain of these steps is the same in tiles of every size, by either of Hopper's instructions, whichever operand the
weights are. Nothing is split along k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.ops.cuda import skinny_gemm
from engine.ops.cuda.launch import HAS_COPY_ENGINE, PDL, begin_next, cdiv, kernel, shared_memory, wait_for_inputs
from engine.ops.cuda.pointwise import swiglu


class InvariantTile(NamedTuple):
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int  # tiles that are read ahead, where there is room


FLOAT32 = InvariantTile(64, 64, 32, 4, 2)
NARROW, WIDE = 4224, 12288  # columns: how many tiles there are decides how large each may be
# By the most rows they are for: tiles for few columns, for more, for many. As measured on an H200.
TILES = {
    64: (InvariantTile(64, 32, 128, 4, 7), InvariantTile(64, 64, 128, 4, 5), InvariantTile(64, 128, 64, 4, 5)),
    128: (InvariantTile(64, 64, 128, 4, 5), InvariantTile(128, 64, 64, 4, 5), InvariantTile(128, 128, 64, 4, 4)),
    256: (InvariantTile(128, 64, 64, 4, 8), InvariantTile(128, 128, 64, 4, 7), InvariantTile(256, 128, 64, 8, 4)),
    1024: (InvariantTile(128, 128, 64, 4, 4),) * 3,
}
LARGEST = InvariantTile(256, 128, 64, 8, 4)
GROUP_SIZE_M = 8  # tiles of rows that go over the same weights at a time


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [T, K] with weight [N, K]. Return [T, N] in the type of both."""
    return _product(x, weight, bias, x.new_empty(len(x), len(weight)))


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `linear`, then `swiglu`: [T, K], [2 F, K] -> [T, F]."""
    if skinny_gemm.are_few(x):
        return skinny_gemm.multiply(x, weight, bias, x.new_empty(len(x), len(weight) // 2), is_gated=True)
    return swiglu(linear(x, weight, bias))


def logits(x: Tensor, weight: Tensor, bias: None = None) -> Tensor:
    """Compute the last linear layer of a graph, whose sums stay float32: [S, K], [V, K] -> f32 [S, V]."""
    return _product(x, weight, None, x.new_empty(len(x), len(weight), dtype=torch.float32))


def tile_for(num_rows: int, columns: int, dtype: torch.dtype) -> InvariantTile:
    """Return the fastest tile. All tiles give the same bits."""
    if dtype == torch.float32:
        return FLOAT32
    for most_rows, tiles in TILES.items():
        if num_rows <= most_rows:
            return tiles[(columns > NARROW) + (columns > WIDE)]
    return LARGEST


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    (num_rows, width), columns = x.shape, len(weight)
    if skinny_gemm.are_few(x):
        return skinny_gemm.multiply(x, weight, bias, out)
    if num_rows:
        tile = tile_for(num_rows, columns, x.dtype)
        is_copied = HAS_COPY_ENGINE and x.dtype != torch.float32 and _is_aligned(x) and _is_aligned(weight)
        rows = TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]) if is_copied else x
        weights = TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]) if is_copied else weight
        room = shared_memory() // ((tile.rows + tile.columns) * tile.depth * x.element_size())
        grid = (cdiv(num_rows, tile.rows) * cdiv(columns, tile.columns),)
        _multiply[grid](
            rows, weights, x if bias is None else bias, out, num_rows, columns, width, bias is not None, is_copied,
            width % tile.depth == 0, tile.rows, tile.columns, tile.depth, GROUP_SIZE_M, num_warps=tile.warps,
            num_stages=min(tile.stages, room), **PDL,
        )  # fmt: skip
    return out


def _is_aligned(matrix: Tensor) -> bool:
    """Return whether the rows begin at multiples of 16 bytes, as the copy engine requires. It reads 0 beyond the last
    row or column.
    """
    return matrix.data_ptr() % 16 == 0 and matrix.shape[1] * matrix.element_size() % 16 == 0


@kernel
def _multiply(
    x, weight, bias, out, num_rows, columns, width,
    HAS_BIAS: tl.constexpr, IS_COPIED: tl.constexpr, IS_WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP_SIZE_M: tl.constexpr,
):  # fmt: skip
    """Compute ROWS x COLUMNS outputs. IS_COPIED says that `x` and `weight` are tensor descriptors, IS_WHOLE that DEPTH
    divides the width.
    """
    begin_next()
    # GROUP_SIZE_M tiles of rows go over the columns side by side, so that weights and rows are found in the L2 cache.
    num_tiles, num_columns = tl.cdiv(num_rows, ROWS), tl.cdiv(columns, COLUMNS)
    first = tl.program_id(0) // (GROUP_SIZE_M * num_columns) * GROUP_SIZE_M
    size = tl.minimum(num_tiles - first, GROUP_SIZE_M)
    index = tl.program_id(0) % (GROUP_SIZE_M * num_columns)
    first_row, first_column = (first + index % size) * ROWS, index // size * COLUMNS
    m = first_row + tl.arange(0, ROWS)
    n = first_column + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    is_row = (m < num_rows)[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    wait_for_inputs()
    for start in range(0, width, DEPTH):
        if IS_COPIED:
            rows = x.load([first_row, start])
            weights = weight.load([first_column, start])
        else:
            is_in = IS_WHOLE | (start + k < width)[None, :]
            rows = tl.load(x + m.to(tl.int64)[:, None] * width + start + k[None, :], mask=is_row & is_in, other=0)
            at_column = weight + tl.minimum(n, columns - 1).to(tl.int64)[:, None] * width
            weights = tl.load(at_column + start + k[None, :], mask=is_in, other=0)
        sums = tl.dot(rows, tl.trans(weights), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < columns, other=0).to(tl.float32)[None, :]
    is_out = is_row & (n < columns)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * columns + n[None, :], sums, mask=is_out)
