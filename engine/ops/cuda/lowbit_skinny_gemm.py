"""The kernel of lowbit.py for few rows: products of codes in registers on the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.launch import begin_next, fetch_ahead, kernel, wait_for_inputs
from engine.ops.cuda.lowbit_values import INTERPRETED, bytes_of, finished, number

# Of two words at a time. A code in the low bits of 128.0 in bf16 adds up to 128 + code.
NIBBLES = tl.constexpr("""{
.reg .b32 t;
lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
shr.u32 t, $4, 4; lop3.b32 $1, t, 0x000F000F, 0x43004300, 0xEA;
shr.u32 t, $4, 8; lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA;
shr.u32 t, $4, 12; lop3.b32 $3, t, 0x000F000F, 0x43004300, 0xEA;
}""")


@kernel
def few(
    x, x_scale, words, scale, zero, bias, out, num_rows, columns, width, num_blocks,
    BITS: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr, IS_GATED: tl.constexpr, IS_EVEN: tl.constexpr, SLICES: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of all rows. With IS_GATED, half of them belong to the gate and half to the gated values,
    whose rows of weights follow all of the gate's. A block of a row of weights has WIDTH words; each slice sums every
    SLICES-th block.
    """
    begin_next()
    PARTS: tl.constexpr = 1 if IS_WHOLE else 16 // BITS
    TYPE: tl.constexpr = tl.int32 if IS_WHOLE else tl.float32
    OWN: tl.constexpr = BLOCK_N // (1 + IS_GATED)
    first = tl.program_id(0) * OWN
    i = tl.arange(0, BLOCK_N)
    # Rows behind the end repeat the last one and are discarded.
    row = (tl.minimum(first + i % OWN, columns - 1) + i // OWN * columns).to(tl.int64)
    _prefetch(words, row, num_blocks, WIDTH, LINES)
    slices = tl.arange(0, SLICES)
    count = columns * (1 + IS_GATED)
    # Scales are read a round ahead, as the compiler does it with words.
    at_scales = tl.minimum(slices, num_blocks - 1)[:, None] * count + row[None, :]
    scales_ahead, zeros_ahead = _scales_at(scale, zero, at_scales, BITS, HAS_ZERO)
    wait_for_inputs()
    i = tl.arange(0, WIDTH)[None, None, :]
    m = tl.arange(0, BLOCK_M)
    is_row = (m < num_rows)[None, :, None]
    rows_of_x = x + m[None, :, None] * width
    ones = tl.full([SLICES, BLOCK_N, WIDTH], 1, tl.float32 if INTERPRETED else tl.bfloat16)
    sums = tl.zeros([SLICES, BLOCK_N, BLOCK_M], TYPE)
    for start in range(0, num_blocks, SLICES):
        # Columns that do not exist are zeros of x: a slice may as well read the last block again.
        block = start + slices if IS_EVEN else tl.minimum(start + slices, num_blocks - 1)
        at = words + (row[None, :] * num_blocks + block[:, None])[:, :, None] * WIDTH + i
        own = _codes(tl.load(at), BITS, IS_WHOLE)
        own_scales, own_zeros = scales_ahead, zeros_ahead
        at_scales = tl.minimum(start + SLICES + slices, num_blocks - 1)[:, None] * count + row[None, :]
        scales_ahead, zeros_ahead = _scales_at(scale, zero, at_scales, BITS, HAS_ZERO)
        for part in tl.static_range(PARTS):
            k = ((start + slices) * PARTS + part)[:, None, None] * WIDTH + i
            values = tl.load(rows_of_x + k, mask=is_row if IS_EVEN else is_row & (k < width), other=0)
            values = tl.permute(values, (0, 2, 1))
            totals = tl.dot(ones, values, input_precision="ieee") if BITS == 4 else values
            sums = _added(sums, own[part], values, totals, own_scales, own_zeros, part, BITS, HAS_ZERO)
    y = finished(tl.sum(sums, 0), x_scale, scale, bias, m[None, :], row[:, None], num_rows, BITS, IS_WHOLE, HAS_BIAS)
    if IS_GATED:
        y, up = tl.split(tl.permute(tl.reshape(y, (2, OWN, BLOCK_M)), (1, 2, 0)))
        y = y / (1 + tl.exp(-y)) * up
    n = first + tl.arange(0, OWN)
    tl.store(out + m[None, :] * columns + n[:, None], y, mask=(m < num_rows)[None, :] & (n < columns)[:, None])


@triton.jit
def _added(
    sums, codes, values, totals, scales, zeros, PART: tl.constexpr, BITS: tl.constexpr, HAS_ZERO: tl.constexpr
):  # fmt: skip
    """Add the products of codes. With 4 bits the sum of a group is scaled instead of each weight, which would be most
    of the work.
    """
    if BITS == 4:
        return sums + _scaled(tl.dot(codes, values, input_precision="ieee"), totals, scales, zeros, PART, HAS_ZERO)
    else:
        return tl.dot(codes, values, sums, input_precision="ieee", out_dtype=sums.dtype)


@triton.jit
def _prefetch(words, row, num_blocks, WIDTH: tl.constexpr, LINES: tl.constexpr):
    """Prefetch the first LINES blocks of these rows into the L2 cache."""
    line = tl.minimum(tl.arange(0, LINES), num_blocks - 1)
    fetch_ahead(words + (row[:, None] * num_blocks + line[None, :]) * WIDTH)


@triton.jit
def _codes(words, BITS: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Return the codes of each part of the words, as a tuple. Codes of 4 bits are returned plus 128."""
    if IS_WHOLE:
        return (words,)
    elif BITS == 8:
        return bytes_of(words)
    else:
        return _nibbles(words)


@triton.jit
def _scales_at(scale, zero, at, BITS: tl.constexpr, HAS_ZERO: tl.constexpr):
    scales = tl.load(scale + at) if BITS == 4 else at
    return scales, tl.load(zero + at) if HAS_ZERO else scales


@triton.jit
def _scaled(sums, totals, scales, zeros, PART: tl.constexpr, HAS_ZERO: tl.constexpr):
    """Convert sums of x times (128 + code), given the sums of x, to sums of x times weights."""
    origin = 136 + number(zeros, PART)[:, :, None] if HAS_ZERO else 136.0
    return (sums - totals * origin) * number(scales, PART)[:, :, None]


@triton.jit
def _nibbles(words):
    if INTERPRETED:
        return (
            ((words & 15) + 128).to(tl.float32),
            (((words >> 4) & 15) + 128).to(tl.float32),
            (((words >> 8) & 15) + 128).to(tl.float32),
            (((words >> 12) & 15) + 128).to(tl.float32),
        )
    else:
        return tl.inline_asm_elementwise(
            NIBBLES, "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
