"""The kernels of lowbit.py for at most MAX_SKINNY_ROWS rows: products of codes or weights in registers on the tensor
cores."""

from __future__ import annotations

import triton.language as tl

from engine.ops.cuda.launch import begin_next, fetch_ahead, kernel, wait_for_inputs
from engine.ops.cuda.lowbit_values import bytes_of, gated, scaled_with_bias, weight_row, weights_of


@kernel
def skinny_gemm(
    x, x_scale, words, scale, bias, out, num_rows, columns, width, num_blocks,
    IS_WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, IS_GATED: tl.constexpr, IS_EVEN: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of all rows, with codes of 8 bits. With IS_GATED, half of them belong to the gate and
    half to the gated values, whose rows of weights follow all of the gate's. A block of a row of weights has WIDTH
    words; each slice sums every SLICES-th block.
    """
    begin_next()
    PARTS: tl.constexpr = 1 if IS_WHOLE else 2
    TYPE: tl.constexpr = tl.int32 if IS_WHOLE else tl.float32
    OWN: tl.constexpr = BLOCK_N // (1 + IS_GATED)
    first = tl.program_id(0) * OWN
    i = tl.arange(0, BLOCK_N)
    # Rows behind the end repeat the last one and are discarded.
    row = (tl.minimum(first + i % OWN, columns - 1) + i // OWN * columns).to(tl.int64)
    line = tl.minimum(tl.arange(0, LINES), num_blocks - 1)
    fetch_ahead(words + (row[:, None] * num_blocks + line[None, :]) * WIDTH)
    slices = tl.arange(0, SLICES)
    wait_for_inputs()
    i = tl.arange(0, WIDTH)[None, None, :]
    m = tl.arange(0, BLOCK_M)
    is_row = (m < num_rows)[None, :, None]
    rows_of_x = x + m[None, :, None] * width
    sums = tl.zeros([SLICES, BLOCK_N, BLOCK_M], TYPE)
    for start in range(0, num_blocks, SLICES):
        # Columns that do not exist are zeros of x: a slice may as well read the last block again.
        block = start + slices if IS_EVEN else tl.minimum(start + slices, num_blocks - 1)
        tile = tl.load(words + (row[None, :] * num_blocks + block[:, None])[:, :, None] * WIDTH + i)
        codes = (tile,) if IS_WHOLE else bytes_of(tile)
        for part in tl.static_range(PARTS):
            k = ((start + slices) * PARTS + part)[:, None, None] * WIDTH + i
            values = tl.load(rows_of_x + k, mask=is_row if IS_EVEN else is_row & (k < width), other=0)
            values = tl.permute(values, (0, 2, 1))
            sums = tl.dot(codes[part], values, sums, input_precision="ieee", out_dtype=TYPE)
    y = scaled_with_bias(
        tl.sum(sums, 0), x_scale, scale, bias, m[None, :], row[:, None], num_rows, 8, IS_WHOLE, HAS_BIAS
    )
    if IS_GATED:
        y, up = tl.split(tl.permute(tl.reshape(y, (2, OWN, BLOCK_M)), (1, 2, 0)))
        y = y / (1 + tl.exp(-y)) * up
    n = first + tl.arange(0, OWN)
    tl.store(out + m[None, :] * columns + n[:, None], y, mask=(m < num_rows)[None, :] & (n < columns)[:, None])


@kernel
def int4_skinny_gemm(
    x, words, scale, zero, bias, out, num_rows, columns, width, num_blocks,
    HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, IS_GATED: tl.constexpr,
    SHARES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Multiply all rows by BLOCK_N rows of weights, SHARES blocks of columns at once. The tile of weights has its rows
    of each block below each other, so has the tile of x, and of all products those of equal blocks are added up.
    """
    begin_next()
    OWN: tl.constexpr = BLOCK_N // (1 + IS_GATED)
    first, count = tl.program_id(0) * OWN, columns * (1 + IS_GATED)
    i, j = tl.arange(0, SHARES * BLOCK_N), tl.arange(0, SHARES * BLOCK_M)
    row, share = weight_row(first, i % BLOCK_N, columns, IS_GATED).to(tl.int64), i // BLOCK_N
    m, share_of_x = j % BLOCK_M, j // BLOCK_M
    line = tl.minimum(tl.arange(0, LINES)[None, :] * SHARES + share[:, None], num_blocks - 1)
    fetch_ahead(words + (row[:, None] * num_blocks + line) * WIDTH)
    rows_of_x, is_row = x + m[:, None] * width, (m < num_rows)[:, None]
    sums = tl.zeros([SHARES * BLOCK_N, SHARES * BLOCK_M], tl.float32)
    wait_for_inputs()
    for start in range(0, num_blocks, SHARES):
        # Columns behind the end are zeros of x, so that any weights may be read for them.
        block = tl.minimum(start + share, num_blocks - 1)
        tile = tl.load(words + (row * num_blocks + block)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
        weights = weights_of(tile, scale, zero, block, row, count, 4, False, HAS_ZERO)
        k = (start + share_of_x)[:, None] * (4 * WIDTH) + tl.arange(0, 4 * WIDTH)[None, :]
        values = tl.load(rows_of_x + k, mask=is_row & (k < width), other=0)
        sums = tl.dot(weights, tl.trans(values), sums, input_precision="ieee")
    if SHARES > 1:
        sums = tl.where(share[:, None] == share_of_x[None, :], sums, 0)
        sums = tl.sum(tl.sum(tl.reshape(sums, (SHARES, BLOCK_N, SHARES, BLOCK_M)), 2), 0)
    m, row = tl.arange(0, BLOCK_M)[None, :], weight_row(first, tl.arange(0, BLOCK_N), columns, IS_GATED)[:, None]
    y = scaled_with_bias(sums, x, scale, bias, m, row, num_rows, 4, False, HAS_BIAS)
    if IS_GATED:
        y = gated(y)
    n = first + tl.arange(0, OWN)[:, None]
    tl.store(out + m * columns + n, y, mask=(m < num_rows) & (n < columns))
