"""Products of float32 matrices as sums of products of bfloat16, which tensor cores compute: each number is divided into
parts of 8 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.launch import INTERPRETED


@triton.jit
def _high(x):
    """Return float32 numbers with the upper 8 bits of their mantissas, which are numbers of bfloat16."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _bf16(x):
    """Convert results of `_high` to bfloat16, which the interpreter lacks."""
    if INTERPRETED:
        return x
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _parts(x):
    """Return three numbers of bfloat16 whose sum is x."""
    a = _high(x)
    b = _high(x - a)
    return _bf16(a), _bf16(b), _bf16(x - a - b)


@triton.jit
def _two_parts(x):
    """Return two numbers of bfloat16 whose sum has 17 bits of x."""
    a = _high(x)
    if INTERPRETED:
        return a, x - a
    return _bf16(a), (x - a).to(tl.bfloat16)


@triton.jit
def dot_of_parts(x, y, sums, IS_FLOAT32: tl.constexpr):
    """Add the product of two matrices to `sums`, as accurate as in float32 or with 17 bits of each number."""
    if IS_FLOAT32:
        a, b, c = _parts(x)
        d, e, f = _parts(y)
        sums = tl.dot(c, d, sums)
        sums = tl.dot(a, f, sums)
        sums = tl.dot(b, e, sums)
        sums = tl.dot(b, d, sums)
        sums = tl.dot(a, e, sums)
        return tl.dot(a, d, sums)
    a, b = _two_parts(x)
    if y.dtype == tl.bfloat16:
        return tl.dot(a, y, tl.dot(b, y, sums))
    d, e = _two_parts(y.to(tl.float32))
    sums = tl.dot(b, e, sums)
    sums = tl.dot(b, d, sums)
    sums = tl.dot(a, e, sums)
    return tl.dot(a, d, sums)
