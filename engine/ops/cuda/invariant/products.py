"""Matrix products whose every output is one chain of sums, over k from the first to the last.

A tensor core adds 16 products to what it is given, in an order of its own that depends on neither row nor column; the
chain of these steps is the same in tiles of every size. Nothing is ever split along k. Few rows are filled up to the 64
of Hopper's instruction: the weights take longer to come than these products take.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, fetch_ahead, wait_for_inputs
from engine.ops.cuda.pointwise import swiglu


class Tile(NamedTuple):
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int  # tiles that are read ahead
    early: int = 0  # lines of each row of weights that are fetched before the inputs are there


FLOAT32 = Tile(64, 64, 32, 4, 2)
WIDE = 12288  # columns: so many tiles that each may have more of them
LINE = 128  # bytes, of the L2 cache
TOGETHER = 8  # tiles of rows that go over the same weights at a time


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times weight [N, K]: [T, N] in the type of x, which is the weight's."""
    return _product(x, weight, bias, x.new_empty(len(x), len(weight)))


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, then `swiglu`: [T, K], [2 F, K] -> [T, F]."""
    return swiglu(linear(x, weight, bias))


def logits(x: Tensor, weight: Tensor, bias: None = None) -> Tensor:
    """`linear` for the last one of a graph: its sums stay float32. [S, K], [V, K] -> f32 [S, V]."""
    return _product(x, weight, None, x.new_empty(len(x), len(weight), dtype=torch.float32))


def tile_for(num_rows: int, columns: int, dtype: torch.dtype) -> Tile:
    """The fastest; every one gives the same bits."""
    if dtype == torch.float32:
        return FLOAT32
    if num_rows <= 64:
        return Tile(64, 64, 128, 4, 5, 8) if columns > WIDE else Tile(64, 32, 128, 4, 7, 16)
    if num_rows <= 256:
        return Tile(128, 128, 64, 8, 4) if columns > WIDE else Tile(128, 64, 64, 4, 5)
    return Tile(128, 256, 64, 8, 3)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    (num_rows, width), columns = x.shape, len(weight)
    if num_rows:
        tile = tile_for(num_rows, columns, x.dtype)
        grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(columns, tile.columns),)
        _multiply[grid](
            x, weight, x if bias is None else bias, out, num_rows, columns, width, bias is not None,
            width % tile.depth == 0, tile.rows, tile.columns, tile.depth, TOGETHER, tile.early,
            LINE // x.element_size(), num_warps=tile.warps, num_stages=tile.stages, **PDL,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])  # or one row would be another kernel
def _multiply(
    x, weight, bias, out, num_rows, columns, width, HAS_BIAS: tl.constexpr, IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, TOGETHER: tl.constexpr, EARLY: tl.constexpr,
    LINE: tl.constexpr,
):  # fmt: skip
    """ROWS x COLUMNS outputs. IS_WHOLE: DEPTH divides the width."""
    begin_next()
    # TOGETHER tiles of rows go over the columns side by side, so that weights and rows are found in the L2 cache.
    num_tiles, num_columns = tl.cdiv(num_rows, ROWS), tl.cdiv(columns, COLUMNS)
    first = tl.program_id(0) // (TOGETHER * num_columns) * TOGETHER
    size = tl.minimum(num_tiles - first, TOGETHER)
    index = tl.program_id(0) % (TOGETHER * num_columns)
    m = (first + index % size) * ROWS + tl.arange(0, ROWS)
    n = index // size * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    of_x = x + m.to(tl.int64)[:, None] * width + k[None, :]
    of_weight = weight + n.to(tl.int64)[:, None] * width + k[None, :]
    is_row, is_column = (m < num_rows)[:, None], (n < columns)[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    if EARLY > 0:
        early = tl.minimum(tl.arange(0, EARLY) * LINE, width - 1)
        fetch_ahead(weight + tl.minimum(n, columns - 1).to(tl.int64)[:, None] * width + early[None, :])
    wait_for_inputs()
    for start in range(0, width, DEPTH):
        if IS_WHOLE:
            rows = tl.load(of_x + start, mask=is_row, other=0)
            weights = tl.load(of_weight + start, mask=is_column, other=0)
        else:
            is_in = (start + k < width)[None, :]
            rows = tl.load(of_x + start, mask=is_row & is_in, other=0)
            weights = tl.load(of_weight + start, mask=is_column & is_in, other=0)
        sums = tl.dot(rows, tl.trans(weights), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < columns, other=0).to(tl.float32)[None, :]
    is_out = is_row & (n < columns)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * columns + n[None, :], sums, mask=is_out)
