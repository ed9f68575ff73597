"""Ops of vision networks. They run once per image and outside of CUDA graphs.

A program of attention has QUERIES rows of one head and goes through the keys of their segment in tiles, with the online
softmax (Milakov and Gimelshein, 2018; tiles as in FlashAttention-2, Dao, 2023).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from engine.ops.cuda.launch import PDL, begin_next, kernel, next_power_of_2, wait_for_inputs
from engine.ops.cuda.rotate_and_cache import rotate_heads

LOG2_E = math.log2(math.e)
QUERIES = 128  # rows of a program
KEYS, OPTIONS = 64, {"num_warps": 4, "num_stages": 3}  # rows of a tile of keys, and how a program runs
F32_KEYS, F32_OPTIONS = 32, {"num_warps": 8, "num_stages": 1}
LEAST = 16  # elements that a matrix product needs


class QueryTiles(NamedTuple):
    """The `segment_ends` of an image as the kernel of attention takes them: i32 [3, tiles], the first row of each tile
    of queries, and the first row of its segment and the one behind it."""

    tiles: Tensor


def query_tiles(segment_ends: np.ndarray) -> np.ndarray:
    """Return the array of QueryTiles."""
    starts = np.concatenate([[0], segment_ends[:-1]])
    counts = -(-(segment_ends - starts) // QUERIES)
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts, ends = np.repeat(starts, counts), np.repeat(segment_ends, counts)
    return np.stack([starts + QUERIES * places, starts, ends]).astype(np.int32)


def bidirectional_attention(
    qkv: Tensor, cos_sin: Tensor, segment_ends: Tensor | QueryTiles, *, num_heads: int, scale: float, is_bf16: int
) -> Tensor:
    """Attend from every row of `qkv` [T, 3 Hq D] to all rows of its segment. Return [T, Hq D] in its type, which says
    what `is_bf16` says on CPUs."""
    if isinstance(segment_ends, QueryTiles):
        tiles = segment_ends.tiles
    else:
        tiles = torch.from_numpy(query_tiles(segment_ends.cpu().numpy())).to(qkv.device)
    head_dim = qkv.shape[1] // (3 * num_heads)
    turned = rotate_heads(qkv, cos_sin, num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim)
    out = qkv.new_empty(len(qkv), num_heads * head_dim)
    keys, options = (F32_KEYS, F32_OPTIONS) if qkv.dtype == torch.float32 else (KEYS, OPTIONS)
    _attend[(tiles.shape[1], num_heads)](
        turned, tiles, out, scale * LOG2_E, num_heads, head_dim, *_parts(head_dim), QUERIES, keys, **options, **PDL
    )
    return out


def _parts(head_dim: int) -> tuple[int, int]:
    """Return the sizes, which are powers of two, of the parts in which a head is read: its largest power of two, and
    one that holds the rest, or 0. A head of 72 takes 64 and 16 elements, not 128."""
    main = max(LEAST, 1 << head_dim.bit_length() - 1)
    rest = head_dim - main
    return main, max(LEAST, next_power_of_2(rest)) if rest > 0 else 0


@kernel
def _attend(
    qkv, query_tiles, out, scale,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute attention of one tile of queries. `scale` includes the factor log2(e), because powers are of two."""
    begin_next()
    wait_for_inputs()
    tile, head = query_tiles + tl.program_id(0), tl.program_id(1)
    first, start, end = tl.load(tile), tl.load(tile + tl.num_programs(0)), tl.load(tile + 2 * tl.num_programs(0))
    WIDTH: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    row = first.to(tl.int64) + tl.arange(0, QUERIES)
    is_row = row < end
    q, q_rest = loaded(qkv + row * WIDTH + head * HEAD_DIM, is_row, True, HEAD_DIM, MAIN, REST)
    m = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, MAIN], tl.float32)
    sums_rest = tl.zeros([QUERIES, REST if REST > 0 else 1], tl.float32)
    keys = qkv + (start.to(tl.int64) + tl.arange(0, KEYS)) * WIDTH + (NUM_HEADS + head) * HEAD_DIM
    count = end - start
    for _ in range(0, count // KEYS):
        m, total, sums, sums_rest = tile_of(
            q, q_rest, keys, KEYS, scale, m, total, sums, sums_rest, False, NUM_HEADS, HEAD_DIM, MAIN, REST, KEYS
        )
        keys += KEYS * WIDTH
    if count % KEYS > 0:
        m, total, sums, sums_rest = tile_of(
            q, q_rest, keys, count % KEYS, scale, m, total, sums, sums_rest, True, NUM_HEADS, HEAD_DIM, MAIN, REST, KEYS
        )
    to = out + row * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    d = tl.arange(0, MAIN)
    tl.store(to[:, None] + d[None, :], sums / total[:, None], mask=is_row[:, None] & (d < HEAD_DIM)[None, :])
    if REST > 0:
        d = MAIN + tl.arange(0, REST)
        tl.store(to[:, None] + d[None, :], sums_rest / total[:, None], mask=is_row[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit
def loaded(
    rows, is_row, IS_EDGE: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """Return both parts of these rows of a head. The second one is a copy of the first if there is no rest."""
    d = tl.arange(0, MAIN)
    if IS_EDGE or MAIN > HEAD_DIM:
        main = tl.load(rows[:, None] + d[None, :], mask=is_row[:, None] & (d < HEAD_DIM)[None, :], other=0)
    else:
        main = tl.load(rows[:, None] + d[None, :])
    rest = main
    if REST > 0:
        d = MAIN + tl.arange(0, REST)
        is_in = (d < HEAD_DIM)[None, :] & is_row[:, None] if IS_EDGE else (d < HEAD_DIM)[None, :]
        rest = tl.load(rows[:, None] + d[None, :], mask=is_in, other=0)
    return main, rest


@triton.jit
def tile_of(
    q, q_rest, keys, count, scale, m, total, sums, sums_rest, IS_EDGE: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Process KEYS more keys, or `count` of them at the edge of the segment. Values lie behind the keys of all
    heads."""
    n = tl.arange(0, KEYS)
    key, key_rest = loaded(keys, n < count, IS_EDGE, HEAD_DIM, MAIN, REST)
    value, value_rest = loaded(keys + NUM_HEADS * HEAD_DIM, n < count, IS_EDGE, HEAD_DIM, MAIN, REST)
    scores = tl.dot(q, tl.trans(key), input_precision="ieee")
    if REST > 0:
        scores = tl.dot(q_rest, tl.trans(key_rest), scores, input_precision="ieee")
    if IS_EDGE:
        scores = tl.where((n < count)[None, :], scores, -float("inf"))
    largest = tl.maximum(m, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - largest[:, None])
    factor = tl.exp2(m - largest)
    total = total * factor + tl.sum(weights, 1)
    weights = weights.to(q.dtype)
    sums = tl.dot(weights, value, sums * factor[:, None], input_precision="ieee")
    if REST > 0:
        sums_rest = tl.dot(weights, value_rest, sums_rest * factor[:, None], input_precision="ieee")
    return largest, total, sums, sums_rest


def interpolate_rows(table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return the sums of rows of the table f32 [N, H], weighted: f32 [T, H]."""
    total = table.new_zeros(len(rows), table.shape[1])
    for index, weight in zip(rows.unbind(1), weights.unbind(1), strict=True):
        total += table[index] * weight[:, None]
    return total


def concat_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of `x` that each row of `rows` [S, n] names, side by side: [S, n H]."""
    return x[rows].flatten(1)


def gelu_erf(x: Tensor) -> Tensor:
    """Compute GELU, element by element."""
    return functional.gelu(x)
