"""Keys and values of 8 bits as the GPU lays them out, a block of the cache at a time: the codes of all keys and values
as a cache of numbers has them, then for each head and position two bf16 scales, the key's and the value's.

The bytes of a block are as many as in the catalogue, where every row has its scale behind it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.launch import INTERPRETED
from engine.ops.cuda.lowbit_values import round_bf16, round_whole

# Of four codes at a time. The low seven bits of a code in those of 128.0 in bf16 add up to 128 and them, of which 128,
# or with the highest bit set 256, is taken: a conversion would go through float32 and take four times as long.
CODES = tl.constexpr("""{
.reg .b32 t, low, high;
prmt.b32 t, $2, 0, 0x4140;
lop3.b32 low, t, 0x007F007F, 0x43004300, 0xEA; lop3.b32 high, t, 0x00800080, 0x43004300, 0xEA;
sub.rn.bf16x2 $0, low, high;
prmt.b32 t, $2, 0, 0x4342;
lop3.b32 low, t, 0x007F007F, 0x43004300, 0xEA; lop3.b32 high, t, 0x00800080, 0x43004300, 0xEA;
sub.rn.bf16x2 $1, low, high;
}""")


@triton.jit
def put(
    cache, block, row, x, is_in, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Write rows x [heads, D] to `row` of a block. Elements that are masked out are 0."""
    rows: tl.constexpr = 2 * NUM_KV_HEADS * BLOCK_SIZE
    d = tl.arange(0, x.shape[1])
    scale = round_bf16(tl.div_rn(tl.max(tl.abs(x), 1), 127.0)).to(tl.float32)
    inverse = tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    codes = tl.minimum(tl.maximum(round_whole(x * inverse[:, None]), -127.0), 127.0).to(tl.int8)
    base = cache + block * rows * (HEAD_DIM + 2)
    tl.store(base + row[:, None] * HEAD_DIM + d[None, :], codes, mask=is_in)
    pairs = (base + rows * HEAD_DIM).to(tl.pointer_type(tl.int16))
    is_value = row // (rows // 2)
    bits = (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    tl.store(pairs + row % (rows // 2) * 2 + is_value, bits, mask=(row >= 0) & (row < rows))


@triton.jit
def scales_at(
    tiles, block, position, is_in, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Load the scales of positions of a block for the head program_id(1), whose first key is at `tiles`. A number holds
    the scale of a key and that of a value.
    """
    codes: tl.constexpr = 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    head = tl.program_id(1) * BLOCK_SIZE
    pairs = tiles - head * HEAD_DIM + block * 2 * NUM_KV_HEADS * BLOCK_SIZE * (HEAD_DIM + 2) + codes
    return tl.load(pairs.to(tl.pointer_type(tl.int32)) + head + position, mask=is_in, other=0)


@triton.jit
def numbers(codes, like):
    """Convert keys or values to the type of the queries."""
    if INTERPRETED or codes.dtype != tl.int8 or like.dtype != tl.bfloat16:
        return codes.to(like.dtype)
    else:
        return tl.inline_asm_elementwise(CODES, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def key_scales(both):
    return (both << 16).to(tl.float32, bitcast=True)


@triton.jit
def value_scales(both):
    return (both & -65536).to(tl.float32, bitcast=True)
