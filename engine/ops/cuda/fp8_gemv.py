"""The product of one row with packed weights of 8-bit floats (fp8.py), without the tensor cores: these want eight rows,
and weights and activations in an order of theirs.

A thread has 16 bytes of some rows of weights at a time, whose bytes become float32 by moving their bits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, wait_for_inputs

NARROW, WIDE = 5120, 10240  # columns: so many programs, and what each does best with
# The exponent of an 8-bit float, as that of a float32, is too small by 2^120.
FP8_BEFORE, FP8_AFTER = tl.constexpr(2.0**64), tl.constexpr(2.0**56)


class Fp8GemvTile(NamedTuple):
    """Tile of a program, and how it runs."""

    rows: int  # of weights
    warps: int
    registers: int  # so few that many programs run at once


def tile_for(columns: int) -> Fp8GemvTile:
    """Return the fastest tile on an H200."""
    if columns <= NARROW:
        return Fp8GemvTile(8, 4, 128)
    return Fp8GemvTile(4, 2, 80) if columns <= WIDE else Fp8GemvTile(4, 1, 80)


def multiply(x: Tensor, words: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor, *, is_gated: bool) -> None:
    """Write x [1, K] of bf16 numbers times the weights [N, K] to `out` [1, N]; with `is_gated`, the `swiglu` of the
    product.
    """
    columns, width, num_blocks = out.shape[1], x.shape[1], words.shape[1]
    tile = tile_for(columns)
    threads = 32 * tile.warps
    is_even = num_blocks * 8 % threads == 0 and width == num_blocks * 128
    _multiply[(cdiv(columns, tile.rows // (1 + is_gated)),)](
        x, words, scale, scale if bias is None else bias, out, columns, width, num_blocks,
        len(scale) > 1, bias is not None, is_gated, is_even, tile.rows, threads,
        num_warps=tile.warps, num_stages=1, maxnreg=tile.registers, **PDL,
    )  # fmt: skip


@kernel
def _multiply(
    x, words, scale, bias, out, columns, width, num_blocks,
    IS_BLOCKED: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS outputs. With IS_GATED, half of them belong to the gate and half to the gated values, whose rows of
    weights follow all of the gate's. IS_BLOCKED says that each block has a scale, IS_EVEN that THREADS divides a row
    without padding.
    """
    begin_next()
    OWN: tl.constexpr = ROWS // (1 + IS_GATED)
    first = tl.program_id(0) * OWN
    i = tl.arange(0, ROWS)
    row = (tl.minimum(first + i % OWN, columns - 1) + i // OWN * columns).to(tl.int64)
    thread = tl.arange(0, THREADS)
    pairs = words.to(tl.pointer_type(tl.int32)) + row[:, None] * num_blocks * 32
    count = columns * (1 + IS_GATED)
    ahead = _pairs_at(pairs, 0, num_blocks, ROWS, THREADS)
    scales_ahead = _scales_at(scale, thread, row, count, num_blocks, IS_BLOCKED)
    wait_for_inputs()
    sums = tl.zeros([ROWS, THREADS], tl.float32)
    for start in range(0, num_blocks * 8, THREADS):
        own, scales = ahead, scales_ahead
        ahead = _pairs_at(pairs, start + THREADS, num_blocks, ROWS, THREADS)
        scales_ahead = _scales_at(scale, start + THREADS + thread, row, count, num_blocks, IS_BLOCKED)
        word = start * 8 + tl.arange(0, 8 * THREADS)
        for part in tl.static_range(2):
            k = (word // 64 * 2 + part) * 64 + word % 64
            values = tl.load(x + k) if IS_EVEN else tl.load(x + k, mask=k < width, other=0)
            values = tl.reshape(values.to(tl.float32) * FP8_BEFORE, (1, THREADS, 8))
            found = tl.sum(_numbers(own, part) * values, 2)
            sums += found * scales if IS_BLOCKED else found
    y = tl.sum(sums, 1) * FP8_AFTER
    if not IS_BLOCKED:
        y *= tl.load(scale + row)
    if HAS_BIAS:
        y += tl.load(bias + row).to(tl.float32)
    if IS_GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, OWN)), (1, 0)))
        y = gate / (1 + tl.exp(-gate)) * up
    n = first + tl.arange(0, OWN)
    tl.store(out + n, y, mask=n < columns)


@triton.jit
def _pairs_at(pairs, start, num_blocks, ROWS: tl.constexpr, THREADS: tl.constexpr):
    """Load pairs of words, four for each thread and row, with zeros behind the end of a row."""
    at = start * 4 + tl.arange(0, 4 * THREADS)[None, :]
    loaded = tl.load(pairs + at, mask=at < num_blocks * 32, other=0)
    return tl.reshape(loaded, (ROWS, THREADS, 4))


@triton.jit
def _scales_at(scale, at, row, count, num_blocks, IS_BLOCKED: tl.constexpr):
    if IS_BLOCKED:
        # So that neighbours among the threads are so in the compiler's order, as they are where words are read.
        place = tl.minimum(at // 8, num_blocks - 1)[:, None] * count + row[None, :]
        return tl.trans(tl.load(scale + place))
    else:
        return at


@triton.jit
def _numbers(pairs, PART: tl.constexpr):
    """Return [rows, threads, 8] times 2^-120: the numbers of the lower and of the upper word of each pair, one after
    the other, in the order of the columns.
    """
    both = tl.join(_number(pairs, PART), _number(pairs, PART + 2))
    return tl.reshape(both, (pairs.shape[0], pairs.shape[1], 8))


@triton.jit
def _number(pairs, PLACE: tl.constexpr):
    moved = (pairs << 24 - 8 * PLACE) >> 4
    return (moved & -0x78100000).to(tl.float32, bitcast=True)
