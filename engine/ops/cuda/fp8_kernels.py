"""The kernels of fp8.py: a skinny GEMM with weights widened in registers, and a GEMM on the tensor cores' own 8-bit
floats.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.launch import INTERPRETED, begin_next, fetch_ahead, kernel, wait_for_inputs
from engine.ops.cuda.lowbit_values import round_bf16

# Of two words at a time: the exponent of a byte, which has 4 bits, becomes the lower ones of a bf16's. The number is
# then too small by 2^120. Numbers below the smallest exponent are so in both.
BYTES = tl.constexpr("""{
.reg .b32 size, sign, large, zero;
mov.b32 large, 0x7B807B80; mov.b32 zero, 0x80008000;
shl.b32 size, $2, 4; shl.b32 sign, $2, 8; and.b32 size, size, 0x07F007F0;
lop3.b32 size, sign, 0x80008000, size, 0xEA;
fma.rn.bf16x2 $0, size, large, zero;
shr.u32 size, $2, 4; and.b32 size, size, 0x07F007F0;
lop3.b32 size, $2, 0x80008000, size, 0xEA;
fma.rn.bf16x2 $1, size, large, zero;
}""")


@triton.jit
def widened(words):
    """Return the numbers in the lower and in the upper bytes, as bf16."""
    if INTERPRETED:
        low = (words & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        high = ((words >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            BYTES, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )


@kernel
def skinny_gemm(
    x, words, scale, bias, out, num_rows, columns, width, num_blocks,
    IS_BLOCKED: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, IS_EVEN: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of all rows for BLOCK_N rows of weights; with IS_GATED, rows of the gate and of the gated
    values alternate. Each slice sums every SLICES-th block of columns.
    """
    begin_next()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    num_weights = columns * (1 + IS_GATED)
    row = n // 2 + n % 2 * columns if IS_GATED else n
    row = tl.minimum(row, num_weights - 1).to(tl.int64)  # rows behind the end repeat the last one and are discarded
    if LINES > 0:
        line = tl.minimum(tl.arange(0, LINES), num_blocks - 1)
        fetch_ahead(words + (row[:, None] * num_blocks + line[None, :]) * 64)
    slices = tl.arange(0, SLICES)
    # Scales are read a round ahead, as the compiler does it with words.
    at_scales = tl.minimum(slices, num_blocks - 1)[:, None] * num_weights + row[None, :]
    scales_ahead = tl.load(scale + at_scales) if IS_BLOCKED else at_scales
    wait_for_inputs()
    i = tl.arange(0, 64)[None, None, :]
    m = tl.arange(0, BLOCK_M)
    is_row = (m < num_rows)[None, :, None]
    rows_of_x = x + m[None, :, None] * width
    sums = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, num_blocks, SLICES):
        # Columns that do not exist are zeros of x: a slice may as well read the last block again.
        block = first + slices if IS_EVEN else tl.minimum(first + slices, num_blocks - 1)
        tile = tl.load(words + (row[None, :] * num_blocks + block[:, None])[:, :, None] * 64 + i)
        low, high = widened(tile)
        k = (first + slices)[:, None, None] * 128 + i
        x_low = tl.load(rows_of_x + k, mask=is_row if IS_EVEN else is_row & (k < width), other=0)
        x_high = tl.load(rows_of_x + k + 64, mask=is_row if IS_EVEN else is_row & (k + 64 < width), other=0)
        x_low, x_high = tl.permute(x_low, (0, 2, 1)), tl.permute(x_high, (0, 2, 1))
        if IS_BLOCKED:
            scales = scales_ahead
            at_scales = tl.minimum(first + SLICES + slices, num_blocks - 1)[:, None] * num_weights + row[None, :]
            scales_ahead = tl.load(scale + at_scales)
            part = tl.dot(low, x_low, input_precision="ieee")
            sums += tl.dot(high, x_high, part, input_precision="ieee") * scales[:, :, None]
        else:
            sums = tl.dot(low, x_low, sums, input_precision="ieee")
            sums = tl.dot(high, x_high, sums, input_precision="ieee")
    y = tl.sum(sums, 0)
    if not IS_BLOCKED:
        y *= tl.load(scale + row)[:, None]
    if HAS_BIAS:
        y += tl.load(bias + row).to(tl.float32)[:, None]
    if IS_GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, [BLOCK_N // 2, 2, BLOCK_M]), (0, 2, 1)))
        y = gate / (1 + tl.exp(-gate)) * up
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    tl.store(out + m[None, :] * columns + n[:, None], y, mask=(m < num_rows)[None, :] & (n < columns)[:, None])


@kernel
def high_low_gemm(
    x, x_scale, weight, scale, bias, out, num_rows, columns, num_blocks,
    IS_BLOCKED: tl.constexpr, HAS_BIAS: tl.constexpr, IS_COPIED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS x COLUMNS outputs, or a share of their sums. IS_COPIED says that `x` and `weight` are tensor
    descriptors. Programs that read the same weights are launched next to each other.
    """
    begin_next()
    first_row, first_column, split = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS, tl.program_id(2)
    m, n = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    is_row, is_column = m < num_rows, n < columns
    i = tl.arange(0, 128)[None, :]
    each = tl.cdiv(num_blocks, SPLITS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    wait_for_inputs()
    for block in range(split * each, tl.minimum(split * each + each, num_blocks)):
        if IS_COPIED:
            high, low = x.load([first_row, block * 128]), x.load([first_row + num_rows, block * 128])
            weights = weight.load([first_column, block * 128])
        else:
            at = (m.to(tl.int64) * num_blocks + block)[:, None] * 128 + i
            high = tl.load(x + at, mask=is_row[:, None], other=0.0)
            low = tl.load(x + at + tl.cast(num_rows, tl.int64) * num_blocks * 128, mask=is_row[:, None], other=0.0)
            at = (n.to(tl.int64) * num_blocks + block)[:, None] * 128 + i
            weights = tl.load(weight + at, mask=is_column[:, None], other=0.0)
        # The sums of the tensor cores have 14 bits: those of more than a block are not left to them.
        part = tl.dot(high, tl.trans(weights), tl.dot(low, tl.trans(weights)))
        if IS_BLOCKED:
            sums += part * tl.load(scale + tl.cast(block, tl.int64) * columns + n, mask=is_column, other=0)[None, :]
        else:
            sums += part
    sums *= tl.load(x_scale + m, mask=is_row, other=0)[:, None]
    if not IS_BLOCKED:
        sums *= tl.load(scale + n, mask=is_column, other=0)[None, :]
    if HAS_BIAS:
        if split == 0:
            sums += tl.load(bias + n, mask=is_column, other=0).to(tl.float32)[None, :]
    at = (split.to(tl.int64) * num_rows + m)[:, None] * columns + n[None, :]
    tl.store(out + at, sums, mask=is_row[:, None] & is_column[None, :])


@kernel
def split_high_low(x, both, scale, width, num_blocks, BLOCKS: tl.constexpr):
    """Split a row into two rows of 8-bit floats whose sum it is, with a common scale that is a power of two. Columns
    that are 64 apart are neighbours, as in packed words.
    """
    begin_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)[:, None]
    k = block * 128 + tl.arange(0, 64)[None, :]
    left = round_bf16(tl.load(x + row * width + k, mask=k < width, other=0).to(tl.float32)).to(tl.float32)
    right = round_bf16(tl.load(x + row * width + k + 64, mask=k + 64 < width, other=0).to(tl.float32)).to(tl.float32)
    bits = tl.max(tl.maximum(tl.abs(left), tl.abs(right))).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(bits >> 23, 8), 254)
    inverse = ((261 - exponent) << 23).to(tl.float32, bitcast=True)  # the largest: 128 or more, below 256
    values = tl.reshape(tl.join(left * inverse, right * inverse), (BLOCKS, 128))
    high = to_fp8(values)
    at = (row * num_blocks + block) * 128 + tl.arange(0, 128)[None, :]
    tl.store(both + at, high, mask=block < num_blocks)
    at += tl.num_programs(0).to(tl.int64) * num_blocks * 128
    tl.store(both + at, to_fp8(values - high.to(tl.float32)), mask=block < num_blocks)
    is_nan = tl.sum(values * 0)  # not a number in a row that is not finite, which the result then has to be
    tl.store(scale + row, ((exponent - 7) << 23).to(tl.float32, bitcast=True) + is_nan)


@triton.jit
def to_fp8(x):
    """Round to the nearest 8-bit float, ties to even, which the interpreter does not always do."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, x + 24576.0 - 24576.0, rounded)  # there neighbours are 2^-9 apart
    return x.to(tl.float8e4nv)


@kernel
def add_high_low(
    products, x_scale, scale, bias, out, num_rows, columns,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the products of the two rows of 8-bit floats that stand for a row; with IS_GATED, then apply the gate."""
    begin_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = _high_plus_low(
        products, x_scale, scale, bias, (row, n, n < columns), num_rows, columns * (1 + IS_GATED), HAS_BIAS
    )
    if IS_GATED:
        up = _high_plus_low(
            products, x_scale, scale, bias, (row, columns + n, n < columns), num_rows, columns * 2, HAS_BIAS
        )
        y = y / (1 + tl.exp(-y)) * up
    tl.store(out + row * columns + n, y, mask=n < columns)


@triton.jit
def _high_plus_low(products, x_scale, scale, bias, where, num_rows, width, HAS_BIAS: tl.constexpr):
    row, n, is_in = where
    high = tl.load(products + row * width + n, mask=is_in, other=0).to(tl.float32)
    low = tl.load(products + (num_rows + row) * width + n, mask=is_in, other=0).to(tl.float32)
    y = (high + low) * tl.load(x_scale + row) * tl.load(scale + n, mask=is_in, other=0)
    return y + tl.load(bias + n, mask=is_in, other=0).to(tl.float32) if HAS_BIAS else y


@kernel
def dequantize(words, scale, out, num_rows, width, IS_BLOCKED: tl.constexpr, ROWS: tl.constexpr):
    """Write a block of ROWS rows of weights as wider numbers."""
    begin_next()
    wait_for_inputs()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (row < num_rows)[:, None]
    row = tl.minimum(row, num_rows - 1).to(tl.int64)
    block = tl.program_id(1)
    i = tl.arange(0, 64)[None, :]
    low, high = widened(tl.load(words + (row * tl.num_programs(1) + block)[:, None] * 64 + i))
    scales = tl.load(scale + (block * num_rows if IS_BLOCKED else 0) + row)[:, None]
    k = block * 128 + i
    at = out + row[:, None] * width + k
    tl.store(at, round_bf16(low.to(tl.float32) * scales), mask=is_row & (k < width))
    tl.store(at + 64, round_bf16(high.to(tl.float32) * scales), mask=is_row & (k + 64 < width))
