"""What packed codes (lowbit.py) stand for: in registers, or all of a matrix; and the codes of activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, fetch_ahead, wait_for_inputs

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Of two words at a time. A code in the low bits of 128.0 in bf16 adds up to 128 + code.
NIBBLES = tl.constexpr("""{
.reg .b32 t;
lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
shr.u32 t, $4, 4; lop3.b32 $1, t, 0x000F000F, 0x43004300, 0xEA;
shr.u32 t, $4, 8; lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA;
shr.u32 t, $4, 12; lop3.b32 $3, t, 0x000F000F, 0x43004300, 0xEA;
}""")
# The same with the lower seven bits, of which 128, or with the highest bit set 256, is taken.
BYTES = tl.constexpr("""{
.reg .b32 t, low, high;
lop3.b32 low, $2, 0x007F007F, 0x43004300, 0xEA; lop3.b32 high, $2, 0x00800080, 0x43004300, 0xEA;
sub.rn.bf16x2 $0, low, high;
shr.u32 t, $2, 8;
lop3.b32 low, t, 0x007F007F, 0x43004300, 0xEA; lop3.b32 high, t, 0x00800080, 0x43004300, 0xEA;
sub.rn.bf16x2 $1, low, high;
}""")
UNPACKED = 32  # rows that a program unpacks


@triton.jit
def prefetch(words, row, num_blocks, LINES: tl.constexpr):
    """The first LINES blocks of these rows on their way into the L2 cache."""
    line = tl.minimum(tl.arange(0, LINES), num_blocks - 1)
    num_words: tl.constexpr = 128 // (words.dtype.element_ty.primitive_bitwidth // 8)  # of a block
    fetch_ahead(words + (row[:, None] * num_blocks + line[None, :]) * num_words)


@triton.jit
def codes(words, BITS: tl.constexpr, IS_WHOLE: tl.constexpr):
    """A tuple: of each part of the words its codes, those of 4 bits and 128."""
    if IS_WHOLE:
        return (words,)
    elif BITS == 8:
        return _bytes(words)
    else:
        return _nibbles(words)


@triton.jit
def scales_at(scale, zero, at, BITS: tl.constexpr, HAS_ZERO: tl.constexpr):
    scales = tl.load(scale + at) if BITS == 4 else at
    return scales, tl.load(zero + at) if HAS_ZERO else scales


@triton.jit
def scaled(sums, totals, scales, zeros, PART: tl.constexpr, HAS_ZERO: tl.constexpr):
    """Of sums of x by 128 + code, and of x: those of x by weights."""
    origin = 136 + _bf16_at(zeros, 16 * PART).to(tl.float32)[:, :, None] if HAS_ZERO else 136.0
    return (sums - totals * origin) * _bf16_at(scales, 16 * PART).to(tl.float32)[:, :, None]


@triton.jit
def weights_of(words, scale, zero, at, BITS: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_ZERO: tl.constexpr):
    """A tuple, for each part of the words what to multiply with. `at`: of their scales."""
    if BITS == 8:
        return codes(words, BITS, IS_WHOLE)
    else:
        scales, zeros = scales_at(scale, zero, at, BITS, HAS_ZERO)
        parts = _nibbles(words)
        return (
            _rounded(parts[0], scales, zeros, 0, HAS_ZERO),
            _rounded(parts[1], scales, zeros, 16, HAS_ZERO),
            _rounded(parts[2], scales, zeros, 32, HAS_ZERO),
            _rounded(parts[3], scales, zeros, 48, HAS_ZERO),
        )


@triton.jit
def _bytes(words):
    if INTERPRETED:
        return ((words << 8) >> 8).to(tl.float32), (words >> 8).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            BYTES, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )


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


@triton.jit
def _rounded(codes, scales, zeros, SHIFT: tl.constexpr, HAS_ZERO: tl.constexpr):
    codes = codes - 136
    if HAS_ZERO:
        codes = codes - tl.expand_dims(_bf16_at(zeros, SHIFT), -1)
    return round_bf16(codes * tl.expand_dims(_bf16_at(scales, SHIFT), -1))


@triton.jit
def _bf16_at(four, SHIFT: tl.constexpr):
    number = (four >> SHIFT).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return number.to(tl.float32) if INTERPRETED else number


@triton.jit
def round_bf16(x):
    """float32 to the nearest bf16, ties to even, which the interpreter, that cannot calculate with it, does by hand."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def round_whole(x):
    """To the nearest whole number, ties to even; |x| < 2^22."""
    if INTERPRETED:
        return x + 12582912.0 - 12582912.0  # 1.5 * 2^23, where the neighbours of a float32 are whole numbers
    else:  # not by that sum: a product before it would not be rounded first
        return tl.inline_asm_elementwise("cvt.rni.f32.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


def codes_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """i8 [T, K] and f32 [T]: whole numbers up to 127, and what one stands for."""
    codes, scale = torch.empty_like(x, dtype=torch.int8), x.new_empty(len(x), dtype=torch.float32)
    block = triton.next_power_of_2(x.shape[1])
    _codes_of[(len(x),)](x, codes, scale, x.shape[1], block, num_warps=4 if block <= 4096 else 16, **PDL)
    return codes, scale


@triton.jit
def _codes_of(x, codes, scale, width, BLOCK: tl.constexpr):
    begin_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    values = tl.load(x + row * width + k, mask=k < width, other=0).to(tl.float32)
    largest = tl.max(tl.abs(values), 0)
    inverse = tl.where(largest > 0, tl.div_rn(127.0, tl.where(largest > 0, largest, 1.0)), 0.0)
    tl.store(codes + row * width + k, round_whole(values * inverse).to(tl.int8), mask=k < width)
    is_nan = tl.sum(values * 0, 0)  # not a number in a row that is not finite, which the result then has to be
    tl.store(scale + row, tl.div_rn(largest, 127.0) + is_nan)


def unpack(weight: tuple[Tensor, Tensor, Tensor | None], x: Tensor) -> Tensor:
    """[N, K] in the type of x, whose columns say what K is."""
    words, scale, zero = weight
    num_rows, num_blocks = words.shape[:2]
    out = x.new_empty(num_rows, x.shape[1])
    bits = 4 if scale.dtype == torch.int64 else 8
    _unpack[(triton.cdiv(num_rows, UNPACKED), num_blocks)](
        words,
        scale,
        scale if zero is None else zero,
        out,
        num_rows,
        x.shape[1],
        bits,
        zero is not None,
        UNPACKED,
        **PDL,
    )
    return out


@triton.jit
def _unpack(
    words, scale, zero, out, num_rows, width, BITS: tl.constexpr, HAS_ZERO: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """A block of ROWS rows."""
    begin_next()
    wait_for_inputs()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (row < num_rows)[:, None]
    row = tl.minimum(row, num_rows - 1).to(tl.int64)
    block = tl.program_id(1)
    i = tl.arange(0, 64)[None, :]
    tile = tl.load(words + (row * tl.num_programs(1) + block)[:, None] * 64 + i)
    own = weights_of(tile, scale, zero, block * num_rows + row, BITS, False, HAS_ZERO)
    for part in tl.static_range(16 // BITS):
        k = (block * (16 // BITS) + part) * 64 + i
        values = own[part].to(tl.float32)
        if BITS == 8:
            values = values * tl.load(scale + row)[:, None]
        tl.store(out + row[:, None] * width + k, values, mask=is_row & (k < width))
