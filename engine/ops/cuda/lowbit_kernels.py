"""The kernels of lowbit.py: products of codes in registers on the tensor cores, for few rows and for more."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.launch import begin_next, wait_for_inputs
from engine.ops.cuda.lowbit_values import INTERPRETED, codes, prefetch, scaled, scales_at, weights_of


@triton.jit(do_not_specialize=["num_rows"])
def few(
    x, x_scale, words, scale, zero, bias, out, num_rows, columns, width, num_blocks,
    BITS: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr, IS_EVEN: tl.constexpr, SLICES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of all rows; gated: of the gate and of what it is for, whose rows of weights follow all of the
    gate's. Each slice is the sum of every SLICES-th block of columns."""
    begin_next()
    PARTS: tl.constexpr = 1 if IS_WHOLE else 16 // BITS
    WIDTH: tl.constexpr = 128 if IS_WHOLE else 64
    TYPE: tl.constexpr = tl.int32 if IS_WHOLE else tl.float32
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, columns - 1).to(tl.int64)  # behind the last one: it again, for nobody
    up = columns.to(tl.int64)
    if LINES > 0:
        prefetch(words, row, num_blocks, LINES)
        if IS_GATED:
            prefetch(words, row + up, num_blocks, LINES)
    slices = tl.arange(0, SLICES)
    count = columns * (1 + IS_GATED)
    # Scales are read a round ahead, as the compiler does it with words.
    at_scales = tl.minimum(slices, num_blocks - 1)[:, None] * count + row[None, :]
    scales_ahead, zeros_ahead = scales_at(scale, zero, at_scales, BITS, HAS_ZERO)
    if IS_GATED:
        up_scales_ahead, up_zeros_ahead = scales_at(scale, zero, at_scales + up, BITS, HAS_ZERO)
    wait_for_inputs()
    i = tl.arange(0, WIDTH)[None, None, :]
    m = tl.arange(0, BLOCK_M)
    is_row = (m < num_rows)[None, :, None]
    rows_of_x = x + m[None, :, None] * width
    ones = tl.full([SLICES, BLOCK_N, WIDTH], 1, tl.float32 if INTERPRETED else tl.bfloat16)
    sums = tl.zeros([SLICES, BLOCK_N, BLOCK_M], TYPE)
    up_sums = tl.zeros([SLICES, BLOCK_N, BLOCK_M], TYPE)
    for first in range(0, num_blocks, SLICES):
        # Columns that do not exist are zeros of x: a slice may as well read the last block again.
        block = first + slices if IS_EVEN else tl.minimum(first + slices, num_blocks - 1)
        at = words + (row[None, :] * num_blocks + block[:, None])[:, :, None] * WIDTH + i
        own = codes(tl.load(at), BITS, IS_WHOLE)
        own_scales, own_zeros = scales_ahead, zeros_ahead
        at_scales = tl.minimum(first + SLICES + slices, num_blocks - 1)[:, None] * count + row[None, :]
        scales_ahead, zeros_ahead = scales_at(scale, zero, at_scales, BITS, HAS_ZERO)
        if IS_GATED:
            ups = codes(tl.load(at + up * num_blocks * WIDTH), BITS, IS_WHOLE)
            up_scales, up_zeros = up_scales_ahead, up_zeros_ahead
            up_scales_ahead, up_zeros_ahead = scales_at(scale, zero, at_scales + up, BITS, HAS_ZERO)
        for part in tl.static_range(PARTS):
            k = ((first + slices) * PARTS + part)[:, None, None] * WIDTH + i
            values = tl.load(rows_of_x + k, mask=is_row if IS_EVEN else is_row & (k < width), other=0)
            values = tl.permute(values, (0, 2, 1))
            totals = tl.dot(ones, values, input_precision="ieee") if BITS == 4 else values
            sums = _added(sums, own[part], values, totals, own_scales, own_zeros, part, BITS, HAS_ZERO)
            if IS_GATED:
                up_sums = _added(up_sums, ups[part], values, totals, up_scales, up_zeros, part, BITS, HAS_ZERO)
    y = _finished(tl.sum(sums, 0), x_scale, scale, bias, m, row, num_rows, BITS, IS_WHOLE, HAS_BIAS)
    if IS_GATED:
        up_y = _finished(tl.sum(up_sums, 0), x_scale, scale, bias, m, row + up, num_rows, BITS, IS_WHOLE, HAS_BIAS)
        y = y / (1 + tl.exp(-y)) * up_y
    tl.store(out + m[None, :] * columns + n[:, None], y, mask=(m < num_rows)[None, :] & (n < columns)[:, None])


@triton.jit
def _added(
    sums, codes, values, totals, scales, zeros, PART: tl.constexpr, BITS: tl.constexpr, HAS_ZERO: tl.constexpr
):  # fmt: skip
    """Of 4 bits a group's sum is scaled, not each of its weights: that would be the most of the work."""
    if BITS == 4:
        return sums + scaled(tl.dot(codes, values, input_precision="ieee"), totals, scales, zeros, PART, HAS_ZERO)
    else:
        return tl.dot(codes, values, sums, input_precision="ieee", out_dtype=sums.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def many(
    x, x_scale, words, scale, zero, bias, out, num_rows, columns, width, num_blocks,
    BITS: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of BLOCK_M rows, or a share of their sums. Programs that read the same weights begin together."""
    begin_next()
    wait_for_inputs()
    PARTS: tl.constexpr = 1 if IS_WHOLE else 16 // BITS
    WIDTH: tl.constexpr = 128 if IS_WHOLE else 64
    TYPE: tl.constexpr = tl.int32 if IS_WHOLE else tl.float32
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, columns - 1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, WIDTH)[None, :]
    rows_of_x = x + m.to(tl.int64)[:, None] * width
    is_row = (m < num_rows)[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_M], TYPE)
    split = tl.program_id(2)
    each = tl.cdiv(num_blocks, SPLITS)
    for block in range(split * each, tl.minimum(split * each + each, num_blocks)):
        tile = tl.load(words + (row * num_blocks + block)[:, None] * WIDTH + i)
        own = weights_of(tile, scale, zero, block * columns + row, BITS, IS_WHOLE, HAS_ZERO)
        for part in tl.static_range(PARTS):
            k = (block * PARTS + part) * WIDTH + i
            values = tl.load(rows_of_x + k, mask=is_row & (k < width), other=0)
            sums = tl.dot(own[part], tl.trans(values), sums, input_precision="ieee", out_dtype=TYPE)
    y = _finished(sums, x_scale, scale, bias, m, row, num_rows, BITS, IS_WHOLE, HAS_BIAS and split == 0)
    at = out + (split.to(tl.int64) * num_rows + m)[None, :] * columns + n[:, None]
    tl.store(at, y, mask=(m < num_rows)[None, :] & (n < columns)[:, None])


@triton.jit(do_not_specialize=["count"])
def add_up(shares, out, count, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    begin_next()
    wait_for_inputs()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        y += tl.load(shares + tl.cast(count, tl.int64) * split + at, mask=at < count, other=0)
    tl.store(out + at, y, mask=at < count)


@triton.jit
def _finished(sums, x_scale, scale, bias, m, row, num_rows, BITS: tl.constexpr, IS_WHOLE: tl.constexpr, has_bias):
    """[BLOCK_N, BLOCK_M]: with the scales of its rows, and the bias."""
    y = sums.to(tl.float32)
    if IS_WHOLE:
        y = y * tl.load(x_scale + m, mask=m < num_rows, other=0)[None, :]
    if BITS == 8:
        y = y * tl.load(scale + row)[:, None]
    if has_bias:
        y += tl.load(bias + row).to(tl.float32)[:, None]
    return y
