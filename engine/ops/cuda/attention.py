"""Paged attention: rotation and cache write in one kernel, attention in a second, and where a request's blocks are
shared out to several programs (split-KV), their sums in a third.

A program of the second kernel has up to ROWS rows: the query heads of one key/value head for TOKENS tokens of one
request. Which request is found in `query_starts`, so that the grid follows from shapes alone. It goes through the
request's keys in tiles of a block or a part of one, with the online softmax (Milakov and Gimelshein, 2018; tiles as in
FlashAttention-2, Dao, 2023; split-KV as in Flash-Decoding, Dao et al., 2023).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.dtypes import scale_bytes
from engine.ops.cuda.int8_cache import key_scales, put, scales_at, value_scales
from engine.ops.cuda.launch import PDL, begin_next, wait_for_inputs

MIN_ROWS = 16  # of a matrix product
PREFILL_ROWS = 128
MAX_TILE = 64  # positions
DECODE = {"num_warps": 2, "num_stages": 3}  # of a program; stages: tiles that are read ahead
PREFILL = {"num_warps": 8, "num_stages": 2, "maxnreg": 128}  # with 128 registers two of them run on an SM
HEADS = 8  # that a program of `_place` writes
PROGRAMS_PER_SM = 4  # of the decode kernel, that run at once
MAX_SPLITS = 32


@dataclass(frozen=True)
class HeadNorm:
    """Norms of query and key heads that are still to be done: `head_norm` as a part of `paged_attention`."""

    qkv: Tensor
    q_weight: Tensor
    k_weight: Tensor
    epsilon: float


def head_norm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, *, num_heads: int, num_kv_heads: int, epsilon: float
) -> HeadNorm:
    """Is done by the op that its output goes to in every graph, `paged_attention`, which reads these heads anyway."""
    return HeadNorm(qkv, q_weight, k_weight, epsilon)


def paged_attention(
    qkv: Tensor | HeadNorm,
    cos_sin: Tensor,
    kv_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """[T, (Hq + 2 Hkv) D] over the cache [num_blocks, 2, Hkv, block_size, D]: [T, Hq D], and the cache, updated.
    A cache of int8 has scales, too: int8_cache.py."""
    where = query_starts, context_lens, block_tables
    query = place_all(qkv, cos_sin, kv_cache, where, num_heads)
    out = torch.empty_like(query)
    num_tokens, num_requests, group = len(query), len(context_lens), num_heads // num_kv_heads
    one_each = num_tokens == num_requests
    block_size, head_dim = sizes_of(kv_cache)
    rows = triton.next_power_of_2(max(group, MIN_ROWS if one_each else PREFILL_ROWS))
    tokens = 1 if one_each else rows // group
    num_tiles = num_tokens if one_each else num_tokens // tokens + num_requests
    splits = _num_splits(num_tiles * num_kv_heads, block_tables.shape[1]) if one_each else 1
    partial = query.new_empty(num_tokens, num_heads, splits, head_dim + 2, dtype=torch.float32) if splits > 1 else out
    grid = num_tiles, num_kv_heads, splits
    _attend[grid](
        query, kv_cache, *where, out if splits == 1 else partial, num_requests, block_tables.shape[1],
        scale * math.log2(math.e), num_kv_heads, group, head_dim, max(16, triton.next_power_of_2(head_dim)), block_size,
        min(block_size, MAX_TILE), rows, tokens, one_each, splits,
        **(DECODE if one_each else PREFILL), **PDL,
    )  # fmt: skip
    if splits > 1:
        padded = triton.next_power_of_2(head_dim), triton.next_power_of_2(splits)
        _combine[(num_tokens, num_heads)](partial, out, num_heads, splits, head_dim, *padded, num_warps=2, **PDL)
    return out, kv_cache


def place_all(
    qkv: Tensor | HeadNorm, cos_sin: Tensor, kv_cache: Tensor, where: tuple[Tensor, ...], num_heads: int
) -> Tensor:
    """Writes rotated keys, and values, into the cache; returns the rotated queries [T, Hq D]."""
    norm, heads = (qkv, qkv.qkv) if isinstance(qkv, HeadNorm) else (None, qkv)
    num_kv_heads, (block_size, head_dim) = kv_cache.shape[2], sizes_of(kv_cache)
    query = heads.new_empty(len(heads), num_heads * head_dim)
    grid = len(heads), triton.cdiv(num_heads + 2 * num_kv_heads, HEADS)
    weights = (norm.q_weight, norm.k_weight) if norm else (cos_sin, cos_sin)
    _place[grid](
        heads, cos_sin, kv_cache, *where, query, *weights, norm.epsilon if norm else 0.0, len(where[1]),
        where[2].shape[1], norm is not None, len(heads) == len(where[1]), num_heads, num_kv_heads, head_dim,
        triton.next_power_of_2(head_dim), cos_sin.shape[1], block_size, HEADS, **PDL,
    )  # fmt: skip
    return query


def sizes_of(kv_cache: Tensor) -> tuple[int, int]:
    """Tokens of a block, elements of a key."""
    block_size, stored = kv_cache.shape[3:]
    return block_size, stored - scale_bytes(str(kv_cache.dtype).removeprefix("torch."))


def _num_splits(num_programs: int, max_blocks: int) -> int:
    """So many that the device is busy; a power of two, so that few kernels are compiled."""
    room = PROGRAMS_PER_SM * num_sms() // num_programs
    wanted = min(room, max_blocks, MAX_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


@functools.cache
def num_sms() -> int:
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 4


@triton.jit
def request_of(query_starts, num_requests, index, TOKENS: tl.constexpr):
    """The last request b with query_starts[b] // TOKENS + b <= index: whose tile of TOKENS tokens, counted with a spare
    one for each request, has this number. With TOKENS = 0: whose token it is."""
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(query_starts + middle)
        if TOKENS > 0:
            start = start // TOKENS + middle
        if start <= index:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _place(
    qkv, cos_sin, cache, query_starts, context_lens, block_tables, query, q_weight, k_weight, epsilon,
    num_requests, table_width,
    HAS_NORM: tl.constexpr, ONE_EACH: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """One token, HEADS of its Hq + 2 Hkv heads."""
    begin_next()
    wait_for_inputs()
    token = tl.program_id(0)
    if ONE_EACH:
        request = token
    else:
        request = request_of(query_starts, num_requests, token, 0)
    position = tl.load(context_lens + request) + token - tl.load(query_starts + request)
    block = tl.load(block_tables + request * table_width + position // BLOCK_SIZE).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, PADDED_DIM)
    is_in = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    base = qkv + token.to(tl.int64) * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    x = tl.load(base + head[:, None] * HEAD_DIM + d[None, :], mask=is_in, other=0).to(tl.float32)
    # By halves: element d < R/2 is turned with d + R/2, and back.
    half: tl.constexpr = ROTARY_DIM // 2
    is_rotated = (head < NUM_HEADS + NUM_KV_HEADS)[:, None] & (d < ROTARY_DIM)[None, :]
    other = tl.where(d < half, d + half, d - half)
    y = tl.load(base + head[:, None] * HEAD_DIM + other[None, :], mask=is_in & is_rotated, other=0).to(tl.float32)
    if HAS_NORM:
        is_query = (head < NUM_HEADS)[:, None]
        is_normed = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
        scale = 1 / tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + epsilon)[:, None]
        own = tl.where(is_query, _row(q_weight, d, HEAD_DIM), _row(k_weight, d, HEAD_DIM))
        others = tl.where(is_query, _row(q_weight, other, HEAD_DIM), _row(k_weight, other, HEAD_DIM))
        x = tl.where(is_normed, x * scale * own, x)
        y = y * scale * others
    angles = cos_sin + token.to(tl.int64) * ROTARY_DIM + d % half
    cos = tl.load(angles, mask=d < ROTARY_DIM, other=1)[None, :]
    sin = tl.load(angles + half, mask=d < ROTARY_DIM, other=0)[None, :]
    x = tl.where(is_rotated, x * cos + tl.where(d < half, -1.0, 1.0)[None, :] * y * sin, x)
    to_query = query + token.to(tl.int64) * NUM_HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + d[None, :]
    tl.store(to_query, x, mask=is_in & (head < NUM_HEADS)[:, None])
    # Keys, then values: in a block, too, the heads of the keys lie before those of the values.
    row = (head - NUM_HEADS) * BLOCK_SIZE + position % BLOCK_SIZE
    is_in = is_in & (head >= NUM_HEADS)[:, None]
    if cache.dtype.element_ty == tl.int8:
        put(cache, block, row, x, is_in, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    else:
        rows = cache + (block * 2 * NUM_KV_HEADS * BLOCK_SIZE + row)[:, None] * HEAD_DIM
        tl.store(rows + d[None, :], x, mask=is_in)


@triton.jit
def _row(weight, d, HEAD_DIM: tl.constexpr):
    return tl.load(weight + d, mask=(d >= 0) & (d < HEAD_DIM), other=0)[None, :]


@triton.jit
def _attend(
    query, cache, query_starts, context_lens, block_tables, out, num_requests, table_width, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, ONE_EACH: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """`scale` has the factor log2(e): powers are of two."""
    begin_next()
    wait_for_inputs()
    kv_head, split = tl.program_id(1), tl.program_id(2)
    if ONE_EACH:
        request = tl.program_id(0)
        first = request
        count = 1
        begin = 0
    else:
        # The longest come last in a batch and take longest: they begin first.
        index = tl.num_programs(0) - 1 - tl.program_id(0)
        request = request_of(query_starts, num_requests, index, TOKENS)
        first = tl.load(query_starts + request)
        count = tl.load(query_starts + request + 1) - first
        begin = (index - first // TOKENS - request) * TOKENS  # of this tile, in the request
    if begin < count:
        context = tl.load(context_lens + request)
        rows = tl.arange(0, ROWS)
        d = tl.arange(0, PADDED_DIM)
        token = begin + rows // GROUP
        head = kv_head * GROUP + rows % GROUP
        is_row = (rows < TOKENS * GROUP) & (token < count)
        at = ((first + token).to(tl.int64) * NUM_KV_HEADS * GROUP + head) * HEAD_DIM
        is_in = is_row[:, None] & (d < HEAD_DIM)[None, :]
        q = tl.load(query + at[:, None] + d[None, :], mask=is_in, other=0)
        position = context + token
        end = context + tl.minimum(begin + TOKENS, count)
        num_tiles = tl.cdiv(end, TILE)
        each = tl.cdiv(num_tiles, SPLITS)
        start, stop = split * each, tl.minimum(split * each + each, num_tiles)
        num_seen_by_all = tl.minimum((context + begin + 1) // TILE, stop)  # tiles
        m = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        table = block_tables + request * table_width
        tiles = cache + kv_head * BLOCK_SIZE * HEAD_DIM
        for tile in range(start, num_seen_by_all):
            m, total, sums = tile_of(
                q, tiles, table, tile, position, end, scale, m, total, sums,
                NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, False,
            )  # fmt: skip
        for tile in range(tl.maximum(start, num_seen_by_all), stop):
            m, total, sums = tile_of(
                q, tiles, table, tile, position, end, scale, m, total, sums,
                NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, True,
            )  # fmt: skip
        if SPLITS == 1:
            tl.store(out + at[:, None] + d[None, :], sums / total[:, None], mask=is_in)
        else:
            width: tl.constexpr = HEAD_DIM + 2
            row = (((first + token).to(tl.int64) * NUM_KV_HEADS * GROUP + head) * SPLITS + split) * width
            tl.store(out + row[:, None] + d[None, :], sums, mask=is_in)
            tl.store(out + row + HEAD_DIM, m, mask=is_row)
            tl.store(out + row + HEAD_DIM + 1, total, mask=is_row)


@triton.jit
def tile_of(
    q, tiles, table, tile, position, end, scale, m, total, sums,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """TILE positions more. At the edge not every row sees them all, and what lies behind `end` was never written.
    `tiles`: the keys of head program_id(1) in the first block."""
    IS_INT8: tl.constexpr = tiles.dtype.element_ty == tl.int8
    n = tl.arange(0, TILE)
    d = tl.arange(0, PADDED_DIM)
    block = tl.load(table + tile * TILE // BLOCK_SIZE).to(tl.int64)
    base = (
        tiles + block * 2 * NUM_KV_HEADS * BLOCK_SIZE * (HEAD_DIM + 2 * IS_INT8) + tile * TILE % BLOCK_SIZE * HEAD_DIM
    )
    at = n[:, None] * HEAD_DIM + d[None, :]
    seen = tile * TILE + n
    if IS_EDGE:
        is_in = (seen < end)[:, None] & (d < HEAD_DIM)[None, :]
        keys = tl.load(base + at, mask=is_in, other=0)
        values = tl.load(base + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM + at, mask=is_in, other=0)
    elif PADDED_DIM == HEAD_DIM:
        keys = tl.load(base + at)
        values = tl.load(base + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM + at)
    else:
        keys = tl.load(base + at, mask=(d < HEAD_DIM)[None, :], other=0)
        values = tl.load(base + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM + at, mask=(d < HEAD_DIM)[None, :], other=0)
    scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
    if IS_INT8:
        scales = scales_at(tiles, block, tile * TILE % BLOCK_SIZE + n, seen < end, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        scores = scores * key_scales(scales)[None, :]
    if IS_EDGE:
        scores = tl.where(seen[None, :] <= position[:, None], scores, -float("inf"))
    largest = tl.maximum(m, tl.max(scores, 1) * scale)
    floor = tl.where(largest == -float("inf"), 0.0, largest)  # of a row that has seen nothing yet
    weights = tl.exp2(scores * scale - floor[:, None])
    factor = tl.exp2(m - floor)
    total = total * factor + tl.sum(weights, 1)
    if IS_INT8:
        weights = weights * value_scales(scales)[None, :]
    sums = sums * factor[:, None]
    sums = tl.dot(weights.to(q.dtype), values.to(q.dtype), sums, input_precision="ieee")
    return largest, total, sums


@triton.jit
def _combine(
    partial, out, num_heads, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):  # fmt: skip
    """One head of one token: the sums of its splits, each with the largest score and the total weight it goes with."""
    begin_next()
    wait_for_inputs()
    head = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    split = tl.arange(0, PADDED_SPLITS)
    d = tl.arange(0, PADDED_DIM)
    rows = partial + (head * SPLITS + split) * (HEAD_DIM + 2)
    is_split = split < SPLITS
    m = tl.load(rows + HEAD_DIM, mask=is_split, other=-float("inf"))
    factor = tl.exp2(m - tl.max(m, 0))
    total = tl.sum(tl.load(rows + HEAD_DIM + 1, mask=is_split, other=0) * factor, 0)
    is_in = is_split[:, None] & (d < HEAD_DIM)[None, :]
    sums = tl.load(rows[:, None] + d[None, :], mask=is_in, other=0)
    tl.store(out + head * HEAD_DIM + d, tl.sum(sums * factor[:, None], 0) / total, mask=d < HEAD_DIM)
