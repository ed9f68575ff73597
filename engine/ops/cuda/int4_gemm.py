"""Products of packed 4-bit weights (lowbit.py) with 65 to 2,048 rows on Hopper: tiles and launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.ops.cuda.int4_gemm_kernel import GROUPS, TILE, gemm
from engine.ops.cuda.launch import CAN_BE, PDL, cdiv, next_power_of_2, num_sms
from engine.ops.cuda.lowbit_kernels import add_splits

IS_SUPPORTED = CAN_BE and torch.cuda.get_device_capability()[0] == 9
MIN_ROWS, MAX_ROWS = 65, 2048
MIN_BLOCKS = 4  # of columns, that are worth a program
MAX_SPLITS = 8
REGISTERS = 240  # of a thread that multiplies
MAX_REGISTERS = 168  # of a thread when a program begins: a third of those of three groups of warps


class Int4Tile(NamedTuple):
    """Tile of a program."""

    weights: int  # rows of weights of each group of warps
    rows: int  # of x
    stages: int  # blocks of words in shared memory, for each group of warps


class Int4Plan(NamedTuple):
    """Division of a product among programs."""

    tile: Int4Tile
    splits: int  # of the columns, whose sums are added up by another kernel


# As measured on an H100
TILES = Int4Tile(128, 128, 2), Int4Tile(64, 128, 4)
PROGRAMS = 132  # up to which splits are worth their sums
LITTLE = 1024  # tiles of 128 rows of weights times blocks, up to which the other kernels are faster


def plan(num_rows: int, num_weights: int, num_blocks: int, width: int) -> Int4Plan | None:
    """Return how the product of weights [num_weights, width] in `num_blocks` blocks of columns is computed, or None if
    the other kernels have to or are faster. It is the same for all numbers of rows up to a power of two.
    """
    is_possible = IS_SUPPORTED and num_weights % 16 == 0 and num_weights >= 128 and width % 8 == 0
    if not is_possible or not MIN_ROWS <= num_rows <= MAX_ROWS:
        return None
    rows = next_power_of_2(num_rows)

    def count(tile: Int4Tile) -> int:
        return cdiv(rows, tile.rows) * cdiv(num_weights, GROUPS.value * tile.weights)

    if count(TILES[1]) * num_blocks <= LITTLE:
        return None
    tile = min(TILES, key=lambda tile: cdiv(count(tile), num_sms()) * tile.weights)
    splits = max(1, min(PROGRAMS // count(tile), num_blocks // MIN_BLOCKS, MAX_SPLITS))
    return Int4Plan(tile, cdiv(num_blocks, cdiv(num_blocks, splits)))  # without empty splits


def multiply(
    x: Tensor, weight: tuple[Tensor, Tensor, Tensor | None], bias: Tensor | None, out: Tensor, planned: Int4Plan
) -> None:
    """Write the product of x bf16 [T, K] with packed weights (words i16 [N, blocks, 64 or 32], scales and zeros i64
    [blocks, N]) to `out` [T, N], or its `swiglu` to `out` [T, N / 2], which needs a plan without splits.
    """
    (words, scale, zero), (tile, splits) = weight, planned
    (num_rows, columns), (num_weights, num_blocks, width) = out.shape, words.shape
    is_gated = columns < num_weights
    is_staged = splits == 1 and out.dtype != torch.float32
    sums = out if splits == 1 else out.new_empty(splits, num_rows, columns, dtype=torch.float32)
    num_tiles = cdiv(num_rows, tile.rows) * cdiv(num_weights, GROUPS.value * tile.weights) * splits
    line = num_blocks * width
    steps = (8 * line, num_weights // 2 * line) if is_gated else (16 * line, 8 * line)
    arrays = [
        TmaArray(words, (num_weights // 16, 2, 8, line), (*steps, line, 1), (tile.weights // 16, 2, 8, width)),
        TmaArray(x, x.shape, x.stride(), (tile.rows, width)),
        TmaArray(out, out.shape, out.stride(), (tile.rows, TILE.value // (1 + is_gated))) if is_staged else sums,
    ]
    given = (
        scale, scale if zero is None else zero, scale if bias is None else bias,
        num_rows, columns, num_blocks, splits, zero is not None, bias is not None, is_gated, is_staged,
        tile.stages * (64 // width), REGISTERS,
    )  # fmt: skip
    # All that a kernel is compiled for. `columns` stands for whether it is a multiple of 16.
    key = tile, splits == 1, columns, num_weights, width, out.dtype, *map(_kind, (scale, zero, bias))
    _launch(key, min(num_tiles, num_sms()), arrays, given)
    if splits > 1:
        add_splits(sums, out)


class TmaArray(NamedTuple):
    """An array that the copy engine (TMA) reads or writes in blocks. A launch reads these attributes of Triton's
    descriptors, which take longer to make because they check them all.
    """

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False  # read by Triton 3.7


_compiled: dict[tuple[Any, ...], Any] = {}  # kernels of Triton


def _launch(
    key: tuple[Any, ...], num_programs: int, arrays: Sequence[TmaArray | Tensor], given: tuple[Any, ...]
) -> None:
    """Launch the kernel. Triton would find it among those that are compiled by the types, the layouts and the alignment
    of what is given, which takes 90 us for descriptors, longer than some products of prompts take.
    """
    if kernel := _compiled.get(key):
        kernel[num_programs, 1, 1](*arrays, *given)
        return
    described = [_descriptor(each) if isinstance(each, TmaArray) else each for each in arrays]
    if kernel := gemm[(num_programs,)](*described, *given, num_warps=4, maxnreg=MAX_REGISTERS, **PDL):
        _compiled[key] = kernel  # None while kernels are only collected (compilation.py)


def _kind(tensor: Tensor | None) -> tuple[Any, ...]:
    return () if tensor is None else (tensor.dtype, tensor.data_ptr() % 16 == 0)


def _descriptor(array: TmaArray) -> TensorDescriptor:
    bits, line = 8 * array.base.itemsize, array.block_shape[-1] * array.base.itemsize
    layout = NVMMASharedLayout(min(line, 128), bits, len(array.block_shape))
    return TensorDescriptor(array.base, list(array.shape), list(array.strides), list(array.block_shape), layout)
