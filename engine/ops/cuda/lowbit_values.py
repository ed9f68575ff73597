"""Values of packed codes (lowbit.py), in registers or for a whole matrix, and quantization of activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import INTERPRETED, PDL, begin_next, cdiv, kernel, next_power_of_2, wait_for_inputs


def _nibbles(parts: Sequence[int], has_zero: bool) -> str:
    """Return the instructions that make weights of the given parts of two words at a time: a code in the low bits of
    128.0 in bf16 is the number 128 + code. All are in one block, because what is computed between the instructions of
    the tensor cores makes them wait.
    """
    count = len(parts)  # of results, which are before the words in the list of operands, and of scales and zeros after
    lines = ["{", ".reg .b32 t, origin;", "mov.b32 origin, 0x43084308;"]
    for at, part in enumerate(parts):
        lines.append(f"shr.b32 t, ${count}, {4 * part}; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;")
        lines.append("sub.rn.bf16x2 t, t, origin;" + f" sub.rn.bf16x2 t, t, ${2 * count + 1 + at};" * has_zero)
        lines.append(f"mul.rn.bf16x2 ${at}, t, ${count + 1 + at};")
    return "\n".join(lines) + "\n}"


NIBBLES, NIBBLES_LESS_ZEROS = (tl.constexpr(_nibbles(range(4), has_zero)) for has_zero in (False, True))
# The instructions for each part alone.
NIBBLE, NIBBLE_LESS_ZERO = (
    tl.constexpr(tuple(_nibbles([part], has_zero) for part in range(4))) for has_zero in (False, True)
)
# Of codes of 8 bits the lower seven, of which 128, or with the highest bit set 256, is taken.
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
def scaled_with_bias(sums, x_scale, scale, bias, m, n, num_rows, BITS: tl.constexpr, IS_WHOLE: tl.constexpr, has_bias):
    """Apply the scales of rows and columns, and the bias."""
    y = sums.to(tl.float32)
    if IS_WHOLE:
        y = y * tl.load(x_scale + m, mask=m < num_rows, other=0)
    if BITS == 8:
        y = y * tl.load(scale + n)
    if has_bias:
        y += tl.load(bias + n).to(tl.float32)
    return y


@triton.jit
def weight_row(first, i, columns, IS_GATED: tl.constexpr):
    """Return the row of weights of row `i` of a tile. Those behind the end repeat the last one and are discarded. With
    IS_GATED, every other eight rows are the gate's, so that a thread has both factors of an output.
    """
    if IS_GATED:
        return tl.minimum(first + i // 16 * 8 + i % 8, columns - 1) + i // 8 % 2 * columns
    else:
        return tl.minimum(first + i, columns - 1)


@triton.jit
def gated(y):
    """Return the `swiglu` [rows / 2, m] of products [rows, m] whose rows of weights are those of `weight_row`."""
    both = tl.permute(tl.reshape(y, (y.shape[0] // 16, 2, 8, y.shape[1])), (0, 2, 3, 1))
    gate, up = tl.split(both)
    return tl.reshape(gate / (1 + tl.exp(-gate)) * up, (y.shape[0] // 2, y.shape[1]))


@triton.jit
def weights_of(
    words, scale, zero, block, row, columns, BITS: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_ZERO: tl.constexpr
):  # fmt: skip
    """Return weights [rows, columns of a block] as operands of a product."""
    if IS_WHOLE:
        return words
    elif BITS == 8:
        parts = tl.join(*bytes_of(words))
        return tl.reshape(tl.permute(parts, (0, 2, 1)), (words.shape[0], 2 * words.shape[1]))
    else:
        at = (block * columns + row)[:, None]
        scales = tl.load(scale + at)
        zeros = tl.load(zero + at) if HAS_ZERO else scales
        parts = parts_of(words, scales, zeros, HAS_ZERO)
        # Put together by naming registers anew: a dot for each would wait for the one before.
        both = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
        return tl.reshape(tl.permute(both, (0, 2, 3, 1)), (words.shape[0], 4 * words.shape[1]))


@triton.jit
def parts_of(words, scales, zeros, HAS_ZERO: tl.constexpr):
    """Return the weights of the four codes in each word, which are in four groups of columns. `scales` and `zeros` hold
    those of the four groups; their shape is that of the words, with 1 for the last dimension."""
    if INTERPRETED:
        return (
            _weights(words, scales, zeros, 0, HAS_ZERO),
            _weights(words, scales, zeros, 1, HAS_ZERO),
            _weights(words, scales, zeros, 2, HAS_ZERO),
            _weights(words, scales, zeros, 3, HAS_ZERO),
        )
    elif HAS_ZERO:
        return tl.inline_asm_elementwise(
            NIBBLES_LESS_ZEROS, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", (words,) + _four(scales) + _four(zeros),
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            NIBBLES, "=r,=r,=r,=r,r,r,r,r,r", (words,) + _four(scales),
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _four(four):
    return four.to(tl.int16), (four >> 16).to(tl.int16), (four >> 32).to(tl.int16), (four >> 48).to(tl.int16)


@triton.jit
def number(four, PART: tl.constexpr):
    """Return one of the four bf16 in 64 bits, as float32."""
    two = (four >> PART // 2 * 32).to(tl.int32)
    return (two & -65536 if PART % 2 else two << 16).to(tl.float32, bitcast=True)


@triton.jit
def _weights(words, scales, zeros, PART: tl.constexpr, HAS_ZERO: tl.constexpr):
    values = (((words >> 4 * PART) & 15) - 8).to(tl.float32)
    if HAS_ZERO:
        values -= number(zeros, PART)
    return round_bf16(values * number(scales, PART))


@triton.jit
def bytes_of(words):
    """Return the codes in the lower and in the upper bytes of words, as numbers."""
    if INTERPRETED:
        return ((words << 8) >> 8).to(tl.float32), (words >> 8).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            BYTES, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )


@triton.jit
def round_bf16(x):
    """Round float32 to the nearest bf16, ties to even, without bf16 arithmetic, which the interpreter lacks."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def round_whole(x):
    """Round to the nearest whole number, ties to even, for |x| < 2^22."""
    if INTERPRETED:
        return x + 12582912.0 - 12582912.0  # 1.5 * 2^23, where the neighbours of a float32 are whole numbers
    else:  # not by that sum: a product before it would not be rounded first
        return tl.inline_asm_elementwise("cvt.rni.f32.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


def codes_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x to i8 [T, K] with scales f32 [T]. The codes are integers up to 127."""
    codes, scale = torch.empty_like(x, dtype=torch.int8), x.new_empty(len(x), dtype=torch.float32)
    block = next_power_of_2(x.shape[1])
    _codes_of[(len(x),)](x, codes, scale, x.shape[1], block, num_warps=4 if block <= 4096 else 16, **PDL)
    return codes, scale


@kernel
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
    """Return the weight [N, K] in the type of x, whose columns give K."""
    words, scale, zero = weight
    num_rows, num_blocks = words.shape[:2]
    out = x.new_empty(num_rows, x.shape[1])
    bits = 4 if scale.dtype == torch.int64 else 8
    _unpack[(cdiv(num_rows, UNPACKED), num_blocks)](
        words,
        scale,
        scale if zero is None else zero,
        out,
        num_rows,
        x.shape[1],
        bits,
        zero is not None,
        UNPACKED,
        words.shape[2],
        **PDL,
    )
    return out


@kernel
def _unpack(
    words, scale, zero, out, num_rows, width, BITS: tl.constexpr, HAS_ZERO: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Unpack a block of ROWS rows."""
    begin_next()
    wait_for_inputs()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (row < num_rows)[:, None]
    row = tl.minimum(row, num_rows - 1).to(tl.int64)
    block = tl.program_id(1)
    i = tl.arange(0, WIDTH)[None, :]
    tile = tl.load(words + (row * tl.num_programs(1) + block)[:, None] * WIDTH + i)
    own = weights_of(tile, scale, zero, block, row, num_rows, BITS, False, HAS_ZERO)
    k = block * (16 // BITS * WIDTH) + tl.arange(0, 16 // BITS * WIDTH)[None, :]
    values = own.to(tl.float32)
    if BITS == 8:
        values = values * tl.load(scale + row)[:, None]
    tl.store(out + row[:, None] * width + k, values, mask=is_row & (k < width))
