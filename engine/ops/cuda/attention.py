"""Paged attention. One kernel rotates queries and keys and writes the cache (rotate_and_cache.py), a second computes
attention, and a third adds up the sums of several programs if the blocks of a request are split among them (split-KV).
If each request has one token, the second kernel also does the work of the first.

A program of the second kernel has up to ROWS rows: the query heads of one key/value head for TOKENS tokens of one
request. Which request is found in `query_starts`, so that the grid follows from shapes alone. It goes through the
request's keys in tiles of a block or a part of one, with the online softmax (Milakov and Gimelshein, 2018; tiles as in
FlashAttention-2, Dao, 2023; split-KV as in Flash-Decoding, Dao et al., 2023). Long prompts that begin in a step go
another way (prefill_attention.py).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda import balanced_splits, prefill_attention
from engine.ops.cuda.int8_cache import key_scales, numbers, scales_at, value_scales
from engine.ops.cuda.launch import (
    PDL,
    begin_next,
    cdiv,
    kernel,
    next_power_of_2,
    num_sms,
    shared_memory,
    wait_for_inputs,
)
from engine.ops.cuda.prefill_attention import KnownStarts
from engine.ops.cuda.rotate_and_cache import (
    HeadNorm,
    request_of,
    rotate_and_cache,
    rotated_queries,
    sizes_of,
    without_norm,
)
from engine.ops.cuda.split_kv import combine, window_start

LOG2_E = math.log2(math.e)
MIN_ROWS = 16  # of a matrix product
MAX_TILE = 64  # positions
DECODE = {"num_warps": 2, "num_stages": 2}  # of a program; stages: tiles that are read ahead
MOST_ROWS = 64  # of a program where each request has a few tokens
# Rows, positions, and how a program of so many runs. So many registers that several of them run on an SM.
PREFILL = 128, MAX_TILE, {"num_warps": 8, "num_stages": 2, "maxnreg": 128}
INT8_PREFILL = 64, MAX_TILE, {"num_warps": 4, "num_stages": 1, "maxnreg": 168}
# Sums of wider heads need more registers. On a GPU with less shared memory than an H100, fewer positions fit into it.
WIDE = 128  # elements of a head
WIDE_PREFILL = 128, MAX_TILE, {"num_warps": 8, "num_stages": 2}
SMALL_WIDE_PREFILL = 128, 32, {"num_warps": 8, "num_stages": 2}
WIDE_BYTES = 200 << 10  # of shared memory that WIDE_PREFILL needs
WIDE_FLOAT32_PREFILL = 64, 32, {"num_warps": 8, "num_stages": 2}
WIDE_INT8_PREFILL = 64, MAX_TILE, {"num_warps": 8, "num_stages": 1}
PROGRAMS_PER_SM = 4  # of the decode kernel, that run at once
MAX_SPLITS = 64
MAX_BLOCKS = 1 << 30


class Scoring(NamedTuple):
    """Conversion of attention scores to weights: scale, window, soft cap and sinks."""

    scale: float
    window: int  # positions that a query attends to; 0: all
    softcap: float  # 0: none
    sinks: Tensor | None

    @property
    def is_plain(self) -> bool:
        return not self.window and not self.softcap and self.sinks is None

    def numbers(self, anything: Tensor) -> tuple[float, float, Tensor]:
        """Return scale, soft cap and sinks as the kernels take them, whose powers are of two."""
        return self.scale * LOG2_E, self.softcap * LOG2_E, anything if self.sinks is None else self.sinks

    @property
    def kinds(self) -> tuple[int, bool, bool]:
        return self.window, self.softcap > 0, self.sinks is not None


def paged_attention(
    qkv: Tensor | HeadNorm,
    cos_sin: Tensor,
    kv_cache: Tensor,
    query_starts: Tensor | KnownStarts,
    context_lens: Tensor,
    block_tables: Tensor,
    sinks: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute attention of qkv [T, (Hq + 2 Hkv) D] over the cache [num_blocks, 2, Hkv, block_size, D]. Return [T, Hq
    D], and the cache, which is updated in place. An int8 cache also holds scales (int8_cache.py).
    """
    known = query_starts if isinstance(query_starts, KnownStarts) else KnownStarts(query_starts)
    where, heads, fresh = (known.starts, context_lens, block_tables), without_norm(qkv)[0], known.fresh
    num_tokens, num_requests, pairs = len(heads), len(context_lens), None
    scoring = Scoring(scale, window, softcap, sinks)
    if num_tokens == num_requests and not fresh:
        return _attend_all(qkv, kv_cache, where, (num_requests, num_heads, 1), scoring, cos_sin), kv_cache
    if fresh and scoring.is_plain and prefill_attention.are_taken(heads.dtype, kv_cache):
        pairs = kv_cache.new_empty(2, num_kv_heads, num_tokens, kv_cache.shape[4])
        num_requests, num_tokens, *_ = fresh[0]
    query = rotate_and_cache(qkv, cos_sin, kv_cache, where, num_heads, pairs)
    sizes = num_requests, num_heads, known.usual_tokens
    outs = [_attend_all(query[:num_tokens], kv_cache, where, sizes, scoring)] if num_tokens else []
    if pairs is not None:
        outs += [prefill_attention.attend(query[a:b], pairs[:, :, a:b], scale) for _, a, b, _ in fresh]
    return outs[0] if len(outs) == 1 else torch.cat(outs), kv_cache


def head_norm_paged_attention(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, *given: Tensor, epsilon: float, **heads: Any
) -> tuple[Tensor, Tensor]:
    """Compute `head_norm`, then `paged_attention`, in one kernel that reads the heads once."""
    return paged_attention(HeadNorm(qkv, q_weight, k_weight, epsilon), *given, **heads)


def _attend_all(
    qkv: Tensor | HeadNorm,
    kv_cache: Tensor,
    where: tuple[Tensor, ...],
    sizes: tuple[int, int, int],
    scoring: Scoring,
    cos_sin: Tensor | None = None,
) -> Tensor:
    """Launch attention for the first requests of a step; `sizes` are the numbers of requests, of heads, and of tokens
    that hardly any request exceeds. With `cos_sin`, `qkv` is the input of `paged_attention` with one token for each
    request; without, it holds rotated queries.
    """
    query, norm, has_norm = without_norm(qkv)
    num_requests, num_heads, usual_tokens = sizes
    block_tables, num_kv_heads = where[2], kv_cache.shape[2]
    block_size, head_dim = sizes_of(kv_cache)
    num_tokens, out = len(query), query.new_empty(len(query), num_heads * head_dim)
    group, one_each = num_heads // num_kv_heads, num_tokens == num_requests
    rows, most, options = _tile_for(group, usual_tokens, kv_cache.dtype, head_dim > WIDE)
    tokens = 1 if one_each else rows // group
    num_tiles = num_tokens if one_each else num_tokens // tokens + num_requests
    max_blocks = scoring.window // block_size + 2 if scoring.window else MAX_BLOCKS
    if not one_each:  # kernels of decode steps do not depend on the table, so that none is compiled late
        max_blocks = min(block_tables.shape[1], max_blocks)
    splits = _num_splits(cdiv(num_tokens, tokens) * num_kv_heads, max_blocks) if usual_tokens else 1
    tile, division = min(block_size, most), None
    if cos_sin is not None and 1 < num_requests <= balanced_splits.MAX_REQUESTS:
        splits, num_tiles = 1, _num_programs(num_requests, num_kv_heads)
        division = balanced_splits.divide(where[1], num_tiles, tile, scoring.window)
    parts = (num_tiles, num_heads) if division is not None else (num_tokens, num_heads, splits)
    is_whole = splits == 1 and division is None
    partial = out if is_whole else query.new_empty(*parts, head_dim + 2, dtype=torch.float32)
    # Programs without a piece come last: between others, they would leave some multiprocessors more of these.
    grid = (num_tiles, num_kv_heads, splits) if division is None else (1, num_kv_heads, num_tiles)
    _attend[grid](
        query, kv_cache, *where, query if division is None else division, out, partial, num_requests,
        block_tables.shape[1], *scoring.numbers(query), query if cos_sin is None else cos_sin, *norm,
        num_kv_heads, group, head_dim, max(16, next_power_of_2(head_dim)), block_size, tile,
        rows, tokens, one_each, division is not None, splits, 0 if cos_sin is None else cos_sin.shape[1], has_norm,
        *scoring.kinds, **options, **PDL,
    )  # fmt: skip
    if division is not None:
        balanced_splits.combine(partial, division, out, num_requests, num_tiles)
    elif splits > 1:
        padded = next_power_of_2(head_dim), next_power_of_2(splits)
        combine[(num_tokens, num_heads)](partial, out, num_heads, splits, head_dim, *padded, num_warps=2, **PDL)
    return out


def _tile_for(group: int, usual_tokens: int, dtype: torch.dtype, is_wide: bool) -> tuple[int, int, dict[str, int]]:
    """Return rows and positions of a program, and how it runs. A program with `usual_tokens` tokens of a request has
    rows for all of them, if these are not too many."""
    if not usual_tokens:
        if dtype == torch.int8:
            rows, most, options = WIDE_INT8_PREFILL if is_wide else INT8_PREFILL
        elif is_wide:
            of_16_bits = WIDE_PREFILL if shared_memory() > WIDE_BYTES else SMALL_WIDE_PREFILL
            rows, most, options = WIDE_FLOAT32_PREFILL if dtype == torch.float32 else of_16_bits
        else:
            rows, most, options = PREFILL
        return next_power_of_2(max(group, rows)), most, options
    rows = next_power_of_2(max(group, min(group * usual_tokens, MOST_ROWS), MIN_ROWS))
    return (
        rows,
        MAX_TILE,
        DECODE if usual_tokens == 1 else {**DECODE, "num_warps": max(rows // 16, DECODE["num_warps"])},
    )


def _num_programs(num_requests: int, num_kv_heads: int) -> int:
    """Return the number of programs for each key/value head among which the contexts of several requests are divided:
    as many as run at once, or half as many again as requests, for those with longer contexts."""
    return max(PROGRAMS_PER_SM * num_sms() // num_kv_heads, num_requests + num_requests // 2)


def _num_splits(num_programs: int, max_blocks: int) -> int:
    """Return the number of splits that keeps the device busy. It is a power of two, so that few kernels are
    compiled.
    """
    room = PROGRAMS_PER_SM * num_sms() // num_programs
    wanted = min(room, max_blocks, MAX_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


@kernel
def _attend(
    query, cache, query_starts, context_lens, block_tables, division, out, partial, num_requests, table_width, scale,
    softcap, sinks, cos_sin, q_weight, k_weight, epsilon,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, ONE_EACH: tl.constexpr,
    IS_DIVIDED: tl.constexpr, SPLITS: tl.constexpr, ROTARY_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Compute attention of one tile of queries. `scale` includes the factor log2(e), because powers are of two. If
    ROTARY_DIM is not 0, `query` has all heads, which are rotated and cached first; otherwise it has rotated queries.
    """
    begin_next()
    wait_for_inputs()
    if IS_DIVIDED:
        piece = tl.load(division + 1 + tl.program_id(2))
        request, split, begin, count = piece & 0xFFFF, piece >> 16, 0, tl.where(piece < 0, 0, 1)
        first = request
    else:
        split = tl.program_id(2)
        request, first, count, begin = tile_of_queries(query_starts, num_requests, TOKENS, ONE_EACH)
    if begin < count:
        context = tl.load(context_lens + request)
        end = context + tl.minimum(begin + TOKENS, count)
        d = tl.arange(0, PADDED_DIM)
        token, row, is_row = rows_of(first, begin, count, NUM_KV_HEADS, GROUP, ROWS, TOKENS)
        position = context + token
        at = row * HEAD_DIM
        is_in = is_row[:, None] & (d < HEAD_DIM)[None, :]
        num_tiles = tl.cdiv(end, TILE)
        begins = window_start(context + begin, WINDOW) // TILE
        each = tl.load(division) if IS_DIVIDED else tl.cdiv(num_tiles - begins, SPLITS)
        start = begins + split * each
        stop = tl.minimum(start + each, num_tiles)
        if ROTARY_DIM > 0:
            q = rotated_queries(
                query, cos_sin, q_weight, k_weight, epsilon, cache, block_tables + request * table_width,
                request.to(tl.int64), context, is_row, (start < stop) & (stop == num_tiles),
                HAS_NORM, NUM_KV_HEADS, GROUP, HEAD_DIM, PADDED_DIM, ROTARY_DIM, BLOCK_SIZE, ROWS,
            )  # fmt: skip
        else:
            q = tl.load(query + at[:, None] + d[None, :], mask=is_in, other=0)
        num_seen_by_all = tl.minimum((context + begin + 1) // TILE, stop)  # tiles
        m, total = begun(sinks, is_row, split, GROUP, ROWS, HAS_SINKS)
        sums = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        table = block_tables + request * table_width
        tiles = cache + tl.program_id(1) * BLOCK_SIZE * HEAD_DIM
        whole = start  # the first tile whose beginning all rows see
        if WINDOW > 0:
            whole = tl.minimum(tl.maximum(tl.cdiv(window_start(end - 1, WINDOW), TILE), start), stop)
            for tile in range(start, whole):
                m, total, sums = tile_of(
                    q, tiles, table, tile, position, end, scale, softcap, m, total, sums,
                    NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, True, WINDOW, HAS_CAP,
                )  # fmt: skip
        for tile in range(whole, num_seen_by_all):
            m, total, sums = tile_of(
                q, tiles, table, tile, position, end, scale, softcap, m, total, sums,
                NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, False, 0, HAS_CAP,
            )  # fmt: skip
        for tile in range(tl.maximum(whole, num_seen_by_all), stop):
            m, total, sums = tile_of(
                q, tiles, table, tile, position, end, scale, softcap, m, total, sums,
                NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, True, WINDOW, HAS_CAP,
            )  # fmt: skip
        is_whole = num_tiles - begins <= each if IS_DIVIDED else SPLITS == 1
        if is_whole:
            total = tl.where(is_row, total, 1.0)  # padding rows may be outside of every window
            tl.store(out + at[:, None] + d[None, :], sums / total[:, None], mask=is_in)
        else:
            width: tl.constexpr = HEAD_DIM + 2
            part = row + (tl.program_id(2) - first) * NUM_KV_HEADS * GROUP if IS_DIVIDED else row * SPLITS + split
            to = partial + part * width
            tl.store(to[:, None] + d[None, :], sums, mask=is_in)
            tl.store(to + HEAD_DIM, m, mask=is_row)
            tl.store(to + HEAD_DIM + 1, total, mask=is_row)


@triton.jit
def tile_of_queries(query_starts, num_requests, TOKENS: tl.constexpr, ONE_EACH: tl.constexpr):
    """Return this program's request, the first token and the number of tokens of that request, and the first of the
    TOKENS tokens that the program processes.
    """
    if ONE_EACH:
        return tl.program_id(0), tl.program_id(0), 1, 0
    else:
        # The longest come last in a batch and take longest: they begin first.
        index = tl.num_programs(0) - 1 - tl.program_id(0)
        request = request_of(query_starts, num_requests, index, TOKENS)
        first = tl.load(query_starts + request)
        count = tl.load(query_starts + request + 1) - first
        return request, first, count, (index - first // TOKENS - request) * TOKENS


@triton.jit
def rows_of(
    first, begin, count, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Return, for each row, its token in the request, its index among all heads of all tokens, and whether it
    exists.
    """
    rows = tl.arange(0, ROWS)
    token = begin + rows // GROUP
    head = tl.program_id(1) * GROUP + rows % GROUP
    row = (first + token).to(tl.int64) * NUM_KV_HEADS * GROUP + head
    return token, row, (rows < TOKENS * GROUP) & (token < count)


@triton.jit
def begun(sinks, is_row, split, GROUP: tl.constexpr, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Return the largest score and the total weight that rows begin with: in the first split those of their head's
    sink, if it has one."""
    m = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        head = tl.program_id(1) * GROUP + tl.arange(0, ROWS) % GROUP
        sink = tl.load(sinks + head, mask=is_row, other=0).to(tl.float32) * 1.4426950408889634
        m = tl.where(split == 0, sink, m)
        total = tl.where(split == 0, 1.0, total)
    return m, total


@triton.jit
def tile_of(
    q, tiles, table, tile, position, end, scale, softcap, m, total, sums,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, IS_EDGE: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Process TILE more positions. At an edge not every row sees all of them, and nothing was ever written behind
    `end`. `tiles` are the keys of head program_id(1) in the first block. WINDOW says that the edge is that of the
    window.
    """
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
    scores = tl.dot(q, tl.trans(numbers(keys, q)), input_precision="ieee")
    if IS_INT8:
        scales = scales_at(tiles, block, tile * TILE % BLOCK_SIZE + n, seen < end, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        scores = scores * key_scales(scales)[None, :]
    if HAS_CAP:
        scores = scores * scale
        e = tl.exp2(tl.abs(scores) * (-2 * 1.4426950408889634 / softcap))
        scores = softcap * tl.where(scores < 0, -1.0, 1.0) * (1 - e) / (1 + e)
        scale = 1.0
    if IS_EDGE:
        is_seen = seen[None, :] <= position[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (seen[None, :] > position[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, -float("inf"))
    largest = tl.maximum(m, tl.max(scores, 1) * scale)
    floor = tl.where(largest == -float("inf"), 0.0, largest)  # of a row that has seen nothing yet
    weights = tl.exp2(scores * scale - floor[:, None])
    factor = tl.exp2(m - floor)
    total = total * factor + _row_sums(weights, TILE)
    if IS_INT8:
        weights = weights * value_scales(scales)[None, :]
    sums = sums * factor[:, None]
    sums = tl.dot(weights.to(q.dtype), numbers(values, q), sums, input_precision="ieee")
    return largest, total, sums


@triton.jit
def _row_sums(weights, TILE: tl.constexpr):
    """Sum the columns in an order that is the same whether one warp holds all of them or two share them: first every
    other group of eight.
    """
    halves = tl.sum(tl.sum(tl.reshape(weights, (weights.shape[0], TILE // 16, 2, 8)), 1), 2)
    first, second = tl.split(halves)
    return first + second
