"""Matrix products with a matrix of its own for each head. Each output is one chain of sums over k, whatever the tile;
only products of many rows go through torch (cuBLAS), unless BATCH_INVARIANT=1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, cdiv, fetch_ahead, kernel, next_power_of_2, wait_for_inputs

MOST_ROWS = 64  # of the kernel below; more rows are left to torch
LINE = 64  # elements of 16 bits in a cache line


class HeadTile(NamedTuple):
    """Tile of the outputs of one head, and how a program computes it."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


FLOAT32 = HeadTile(16, 32, 32, 4, 2)
TILES = {16: HeadTile(16, 64, 128, 4, 4), 64: HeadTile(64, 64, 64, 4, 4)}  # by the most rows
LARGEST = HeadTile(128, 128, 64, 8, 3)


def head_linear(x: Tensor, weight: Tensor, *, num_heads: int) -> Tensor:
    """Multiply the first K elements of each head of x [T, heads * stride] by its matrix of weight [heads * N, K].
    Return [T, heads * N].
    """
    if len(x) <= MOST_ROWS:
        return invariant_head_linear(x, weight, num_heads=num_heads)
    heads, weights = _heads(x, weight, num_heads)
    y = x.new_empty(len(x), num_heads, weights.shape[1])
    torch.bmm(heads.transpose(0, 1), weights.transpose(1, 2), out=y.transpose(0, 1))
    return y.view(len(x), -1)


def invariant_head_linear(x: Tensor, weight: Tensor, *, num_heads: int) -> Tensor:
    """Compute `head_linear` in an order of sums that does not depend on the number of rows."""
    _, weights = _heads(x, weight, num_heads)
    num_rows, (_, columns, width) = len(x), weights.shape
    y = x.new_empty(num_rows, num_heads * columns)
    if num_rows:
        tile = next((tile for most, tile in TILES.items() if num_rows <= most), LARGEST)
        tile = FLOAT32 if x.dtype == torch.float32 else tile
        depth = min(tile.depth, max(16, next_power_of_2(width)))
        grid = cdiv(columns, tile.columns), num_heads, cdiv(num_rows, tile.rows)
        _multiply[grid](
            x, weight, y, num_rows, x.shape[1] // num_heads, columns, width, width % depth == 0,
            tile.rows, tile.columns, depth, next_power_of_2(cdiv(width, LINE)), LINE,
            num_warps=tile.warps, num_stages=tile.stages, **PDL,
        )  # fmt: skip
    return y


def _heads(x: Tensor, weight: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return the inputs [T, heads, K] and the weights [heads, N, K] as views."""
    weights = weight.view(num_heads, -1, weight.shape[1])
    return x.view(len(x), num_heads, x.shape[1] // num_heads)[..., : weights.shape[2]], weights


@kernel
def _multiply(
    x, weight, y, num_rows, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, NUM_LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Compute ROWS x TILE outputs of one head. IS_WHOLE says that DEPTH divides the width."""
    begin_next()
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    at_column = weight + (head * COLUMNS + tl.minimum(n, COLUMNS - 1)).to(tl.int64)[:, None] * WIDTH
    fetch_ahead(at_column + tl.minimum(tl.arange(0, NUM_LINES) * LINE, WIDTH - 1)[None, :])
    wait_for_inputs()
    is_row = (m < num_rows)[:, None]
    at_row = x + (m.to(tl.int64)[:, None] * num_heads + head) * STRIDE + k[None, :]
    sums = tl.zeros([ROWS, TILE], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        is_in = IS_WHOLE | (start + k < WIDTH)[None, :]
        rows = tl.load(at_row + start, mask=is_row & is_in, other=0)
        weights = tl.load(at_column + start + k[None, :], mask=is_in, other=0)
        sums = tl.dot(rows, tl.trans(weights), sums, input_precision="ieee")
    to = y + (m.to(tl.int64)[:, None] * num_heads + head) * COLUMNS + n[None, :]
    tl.store(to, sums, mask=is_row & (n < COLUMNS)[None, :])
