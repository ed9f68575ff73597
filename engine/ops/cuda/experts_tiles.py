"""Tiles of the kernel of experts.py for slots that are sorted by expert."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from engine.ops.cuda.experts_kernels import DENSE, FP8, INT4, INT8, MXFP4
from engine.ops.cuda.launch import shared_memory

MOST_WITH_ZERO = 511  # slots of an expert: zero points do not fit beside the tile for more
ALL_FIT = 200_000  # bytes of shared memory of an SM, with which all tiles have their stages


class Tile(NamedTuple):
    """Work of a program."""

    slots: int
    columns: int  # outputs; of the gate and of `up` together
    depth: int  # inputs at a time; of packed matrices they are those of a block
    warps: int
    stages: int


# By kind: the fastest tile on an H100 for fewer slots of an expert, on average, than a number.
TILES = {
    DENSE: (
        (8, Tile(16, 64, 128, 4, 4)), (32, Tile(32, 64, 128, 4, 4)),
        (64, Tile(64, 128, 64, 4, 4)), (math.inf, Tile(128, 256, 64, 8, 4)),
    ),
    INT4: (
        (8, Tile(16, 64, 256, 4, 3)), (64, Tile(32, 128, 256, 4, 3)),
        (512, Tile(64, 256, 256, 8, 3)), (math.inf, Tile(128, 128, 256, 8, 3)),
    ),
    MXFP4: (
        (8, Tile(8, 64, 128, 2, 4)), (16, Tile(16, 128, 128, 4, 4)), (32, Tile(32, 64, 128, 2, 4)),
        (128, Tile(64, 128, 128, 4, 3)), (math.inf, Tile(128, 128, 128, 8, 3)),
    ),
    **dict.fromkeys(
        (FP8, INT8),
        (
            (8, Tile(16, 64, 128, 4, 3)), (33, Tile(32, 64, 128, 4, 3)),
            (128, Tile(64, 128, 128, 4, 3)), (math.inf, Tile(128, 256, 128, 8, 3)),
        ),
    ),
}  # fmt: skip


def tile_for(
    num_slots: int, num_experts: int, kind: int, dtype: torch.dtype, *, is_gated: bool, has_zero: bool
) -> Tile:
    """Return the tile for products of slots with matrices of a kind: of the gate and of `up` together, if gated."""
    if dtype == torch.float32:
        return Tile(16, 32, 64, 4, 2)
    average = num_slots // num_experts
    if has_zero:
        average = min(average, MOST_WITH_ZERO)
    if kind == MXFP4 and not is_gated and average >= 128:
        return Tile(128, 256, 128, 8, 3)
    return next(tile for end, tile in TILES[kind] if average < end)


def num_stages(tile: Tile, words: int) -> int:
    """Return the number of stages for which an SM has shared memory. A packed matrix has that many words in a block."""
    if shared_memory() >= ALL_FIT:
        return tile.stages
    stage = 2 * (tile.slots * tile.depth + tile.columns * (words or tile.depth))
    return max(1, min(tile.stages, shared_memory() // stage))
