"""The kernels of lowbit.py for more rows than a skinny GEMM has: products of codes in registers on the tensor cores.
The sum of the splits also serves other products.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, wait_for_inputs
from engine.ops.cuda.lowbit_values import scaled_with_bias, weights_of

ADDED = 1024  # elements of a program that adds up splits


@kernel
def gemm(
    x, x_scale, words, scale, zero, bias, out, num_rows, columns, width, num_blocks,
    BITS: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of BLOCK_M rows, or a share of their sums. Programs that read the same weights are
    launched next to each other.
    """
    begin_next()
    PARTS: tl.constexpr = 1 if IS_WHOLE else 16 // BITS
    TYPE: tl.constexpr = tl.int32 if IS_WHOLE else tl.float32
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, columns - 1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, SLICE)[None, :]
    rows_of_x = x + m.to(tl.int64)[:, None] * width
    is_row = (m < num_rows)[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_M], TYPE)
    split = tl.program_id(2)
    each = tl.cdiv(num_blocks, SPLITS)
    wait_for_inputs()
    PIECES: tl.constexpr = WIDTH // SLICE
    at_k = tl.arange(0, PARTS * SLICE)[None, :]
    at_k = at_k // SLICE * WIDTH + at_k % SLICE
    for piece in range(split * each * PIECES, tl.minimum(split * each + each, num_blocks) * PIECES):
        block, start = piece // PIECES, piece % PIECES * SLICE
        tile = tl.load(words + (row * num_blocks + block)[:, None] * WIDTH + start + i)
        own = weights_of(tile, scale, zero, block, row, columns, BITS, IS_WHOLE, HAS_ZERO)
        k = block * PARTS * WIDTH + start + at_k
        values = tl.load(rows_of_x + k, mask=is_row & (k < width), other=0)
        sums = tl.dot(own, tl.trans(values), sums, input_precision="ieee", out_dtype=TYPE)
    y = scaled_with_bias(
        sums, x_scale, scale, bias, m[None, :], row[:, None], num_rows, BITS, IS_WHOLE, HAS_BIAS and split == 0
    )
    at = out + (split.to(tl.int64) * num_rows + m)[None, :] * columns + n[:, None]
    tl.store(at, y, mask=(m < num_rows)[None, :] & (n < columns)[:, None])


def add_splits(sums: Tensor, out: Tensor) -> None:
    """Write the sum of the splits [splits, T, N] to `out` [T, N]."""
    _add_splits[(cdiv(out.numel(), ADDED),)](sums, out, out.numel(), len(sums), ADDED, **PDL)


@kernel
def _add_splits(shares, out, count, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    begin_next()
    wait_for_inputs()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        y += tl.load(shares + tl.cast(count, tl.int64) * split + at, mask=at < count, other=0)
    tl.store(out + at, y, mask=at < count)
