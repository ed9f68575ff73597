"""Values of packed 4-bit floats (mxfp4.py) in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.launch import INTERPRETED

# Of two words at a time: sign and size of a code are moved to where they are a bf16, 2^126 times too small, in two bf16
# at once. The number is multiplied by its power of two; -0 is added, because older devices only multiply so.
FLOATS = tl.constexpr("""{
.reg .b32 t, u, none;
mov.b32 none, 0x80008000;
and.b32 t, $4, 0x81C081C0; fma.rn.bf16x2 $0, t, $5, none;
shf.l.wrap.b32 t, $4, $4, 10; and.b32 t, t, 0x81C081C0; fma.rn.bf16x2 $1, t, $7, none;
shl.b32 t, $4, 6; and.b32 t, t, 0x81C081C0; fma.rn.bf16x2 $2, t, $9, none;
shl.b32 t, $4, 4; shr.u32 u, $4, 4; and.b32 t, t, 0x81808180;
lop3.b32 t, u, 0x00400040, t, 0xEA; fma.rn.bf16x2 $3, t, $11, none;
}""")


@triton.jit
def mxfp4_parts(words, powers):
    """Return the numbers [rows, 32] of the four codes in each word [rows, 32], which belong to four groups of columns.
    `powers` [rows] are four bytes: the biased exponents of the groups' powers of two, times 2^126.
    """
    first, second = (powers & 255)[:, None], ((powers >> 8) & 255)[:, None]
    third, fourth = ((powers >> 16) & 255)[:, None], ((powers >> 24) & 255)[:, None]
    if INTERPRETED:
        bits = words.to(tl.int32)
        even, odd = tl.split(tl.reshape(bits, (bits.shape[0], 16, 2)))
        other = tl.reshape(tl.join(odd, even), bits.shape)
        turned = ((bits << 10) & 0x8000) | ((other >> 6) & 0x1C0)
        last = ((bits << 4) & 0x8180) | ((bits >> 4) & 0x40)
        return _numbers(bits, first), _numbers(turned, second), _numbers(bits << 6, third), _numbers(last, fourth)
    else:
        return tl.inline_asm_elementwise(
            FLOATS, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            (words, first * 0x800080, second * 0x800080, third * 0x800080, fourth * 0x800080),
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _numbers(bits, powers):
    return ((bits & 0x81C0) << 16).to(tl.float32, bitcast=True) * (powers << 23).to(tl.float32, bitcast=True)
