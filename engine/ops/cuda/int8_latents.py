"""Rows of 8 bits in a cache of latent attention: codes, and a bf16 scale for each group of 64 elements.

A block has the codes of all its rows, then for each group the scales of all rows, as in the catalogue. The latents and
the rotated elements of a row are padded to a power of two apart, and each have groups of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.int8_cache import numbers
from engine.ops.cuda.launch import INTERPRETED
from engine.ops.cuda.lowbit_values import round_bf16, round_whole

GROUP = tl.constexpr(64)  # LATENT_GROUP


@triton.jit
def row_bytes(LATENT: tl.constexpr, ROPE: tl.constexpr, IS_INT8: tl.constexpr):
    """Return the size of a row in elements of the cache, with its scales."""
    return LATENT + ROPE + 2 * num_groups(LATENT, ROPE) * IS_INT8


@triton.jit
def num_groups(LATENT: tl.constexpr, ROPE: tl.constexpr):
    return (LATENT + GROUP - 1) // GROUP + (ROPE + GROUP - 1) // GROUP


@triton.jit
def put_groups(to, scales, x, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Write the codes of x [padded], whose elements from WIDTH on are 0, to `to`, and their scales to `scales`, where
    those of a group are BLOCK_SIZE apart from those of the next."""
    PADDED: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = GROUP if PADDED > GROUP else PADDED
    parts = tl.reshape(x, [PADDED // SIZE, SIZE])
    scale = round_bf16(tl.div_rn(tl.max(tl.abs(parts), 1), 127.0)).to(tl.float32)
    inverse = tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    codes = tl.minimum(tl.maximum(round_whole(parts * inverse[:, None]), -127.0), 127.0).to(tl.int8)
    c, g = tl.arange(0, PADDED), tl.arange(0, PADDED // SIZE)
    tl.store(to + c, tl.reshape(codes, [PADDED]), mask=c < WIDTH)
    bits = (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    tl.store(scales + g * BLOCK_SIZE, bits, mask=g * SIZE < WIDTH)


@triton.jit
def group_numbers(codes, scales, is_in, like, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the numbers of codes [rows, padded] in the type of the queries; `scales` are the places of the first
    scales [rows], of which those `is_in` are read.
    """
    ROWS: tl.constexpr = codes.shape[0]
    PADDED: tl.constexpr = codes.shape[1]
    SIZE: tl.constexpr = GROUP if PADDED > GROUP else PADDED
    g = tl.arange(0, PADDED // SIZE)[None, :]
    bits = tl.load(scales[:, None] + g * BLOCK_SIZE, mask=is_in[:, None] & (g * SIZE < WIDTH), other=0)
    scaled = _scaled(codes, bits[:, :, None], like, [ROWS, PADDED // SIZE, SIZE])
    return tl.reshape(scaled, [ROWS, PADDED])


@triton.jit
def turned_group_numbers(codes, scales, is_in, like, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Do the same for codes [padded, rows]."""
    PADDED: tl.constexpr = codes.shape[0]
    ROWS: tl.constexpr = codes.shape[1]
    SIZE: tl.constexpr = GROUP if PADDED > GROUP else PADDED
    g = tl.arange(0, PADDED // SIZE)[:, None]
    bits = tl.load(scales[None, :] + g * BLOCK_SIZE, mask=is_in[None, :] & (g * SIZE < WIDTH), other=0)
    scaled = _scaled(codes, bits[:, None, :], like, [PADDED // SIZE, SIZE, ROWS])
    return tl.reshape(scaled, [PADDED, ROWS])


@triton.jit
def _scaled(codes, bits, like, SHAPE: tl.constexpr):
    """Return the codes in SHAPE times their scales, of which `bits` are the upper halves."""
    scale = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if INTERPRETED or like.dtype != tl.bfloat16:
        return (tl.reshape(codes.to(tl.float32), SHAPE) * scale).to(like.dtype)
    else:  # the same bits: the product is exact before it is rounded
        return tl.reshape(numbers(codes, like), SHAPE) * scale.to(tl.bfloat16)
