"""Paged attention in one order of sums, whatever the batch, the chunks and the device.

The online softmax runs over UNIT positions of a request at a time, and what the units come to is merged in their order.
Which programs compute the units does not matter: of a decode step several may share a request's, whose sums a second
kernel merges; one that has them all merges them itself, with the same function.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.attention import MAX_TILE, Scoring, begun, rows_of, tile_of, tile_of_queries
from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, next_power_of_2, num_sms, wait_for_inputs
from engine.ops.cuda.prefill_attention import KnownStarts
from engine.ops.cuda.rotate_and_cache import HeadNorm, rotate_and_cache, sizes_of
from engine.ops.cuda.split_kv import merge_unit, merge_units, window_start

UNIT = 256  # positions
# Rows of a program's matrix products, positions, and how such a program runs. The order of sums is the same with two
# warps for 16 rows and with four for 64.
DECODE = 16, MAX_TILE, {"num_warps": 2, "num_stages": 3}
PREFILL = 64, MAX_TILE, {"num_warps": 4, "num_stages": 2}
FLOAT32 = 32, 32, {"num_warps": 4, "num_stages": 2}  # whose products are made in registers
MAX_SPLITS = 32
PROGRAMS_PER_SM = 6


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
    D], and the cache, which is updated in place.
    """
    starts = query_starts.starts if isinstance(query_starts, KnownStarts) else query_starts
    where, scoring = (starts, context_lens, block_tables), Scoring(scale, window, softcap, sinks)
    query = rotate_and_cache(qkv, cos_sin, kv_cache, where, num_heads)
    out = torch.empty_like(query)
    num_tokens, num_requests, group = len(query), len(context_lens), num_heads // num_kv_heads
    one_each = num_tokens == num_requests
    block_size, head_dim = sizes_of(kv_cache)
    of_bf16 = DECODE if one_each and group <= DECODE[0] else PREFILL
    rows, most, options = FLOAT32 if query.dtype == torch.float32 else of_bf16
    rows = next_power_of_2(max(group, rows))
    tokens = 1 if one_each else rows // group
    num_tiles = num_tokens if one_each else num_tokens // tokens + num_requests
    num_units = cdiv(block_tables.shape[1] * block_size, UNIT)
    most_units = min(num_units, window // UNIT + 2 if window else num_units)
    splits = _num_splits(num_tiles * num_kv_heads, most_units) if one_each else 1
    shape = num_tokens, num_heads, num_units, head_dim + 2
    partial = query.new_empty(shape, dtype=torch.float32) if splits > 1 else out
    padded_dim = max(16, next_power_of_2(head_dim))
    _attend[(num_tiles, num_kv_heads, splits)](
        query, kv_cache, *where, partial, num_requests, block_tables.shape[1], num_units, *scoring.numbers(query),
        num_kv_heads, group, head_dim, padded_dim, block_size, min(block_size, most), UNIT, rows, tokens, one_each,
        splits, *scoring.kinds, **options, **PDL,
    )  # fmt: skip
    if splits > 1:
        grid = num_tokens, num_heads
        merge_units[grid](
            partial, context_lens, scoring.numbers(query)[2], out, num_heads, num_units,
            head_dim, padded_dim, UNIT, window, sinks is not None, num_warps=1, **PDL,
        )  # fmt: skip
    return out, kv_cache


def head_norm_paged_attention(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, *given: Tensor, epsilon: float, **heads: Any
) -> tuple[Tensor, Tensor]:
    """Compute `head_norm`, then `paged_attention`, in one kernel that reads the heads once."""
    return paged_attention(HeadNorm(qkv, q_weight, k_weight, epsilon), *given, **heads)


def _num_splits(num_programs: int, num_units: int) -> int:
    wanted = min(PROGRAMS_PER_SM * num_sms() // num_programs, num_units, MAX_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


@kernel
def _attend(
    query, cache, query_starts, context_lens, block_tables, out, num_requests, table_width, num_units_of_table,
    scale, softcap, sinks,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    ONE_EACH: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Compute the query heads of one key/value head for TOKENS tokens of one request; with several splits, a part of
    the units.
    """
    begin_next()
    wait_for_inputs()
    split = tl.program_id(2)
    request, first, count, begin = tile_of_queries(query_starts, num_requests, TOKENS, ONE_EACH)
    if begin < count:
        context = tl.load(context_lens + request)
        end = context + tl.minimum(begin + TOKENS, count)
        d = tl.arange(0, PADDED_DIM)
        token, row, is_row = rows_of(first, begin, count, NUM_KV_HEADS, GROUP, ROWS, TOKENS)
        position = context + token
        is_in = is_row[:, None] & (d < HEAD_DIM)[None, :]
        q = tl.load(query + row[:, None] * HEAD_DIM + d[None, :], mask=is_in, other=0)
        begins = window_start(context + begin, WINDOW) // UNIT
        each = tl.cdiv(tl.cdiv(end, UNIT) - begins, SPLITS)
        num_seen_by_all = (context + begin + 1) // TILE  # tiles
        whole = tl.cdiv(window_start(end - 1, WINDOW), TILE)  # the first tile whose beginning all rows see
        all_m, all_total = begun(sinks, is_row, 0, GROUP, ROWS, HAS_SINKS)
        all_sums = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        table = block_tables + request * table_width
        tiles = cache + tl.program_id(1) * BLOCK_SIZE * HEAD_DIM
        for unit in range(begins + split * each, tl.minimum(begins + split * each + each, tl.cdiv(end, UNIT))):
            start = unit * (UNIT // TILE)
            stop = tl.minimum(start + UNIT // TILE, tl.cdiv(end, TILE))
            edge = tl.minimum(tl.maximum(num_seen_by_all, start), stop)
            m = tl.full([ROWS], -float("inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            sums = tl.zeros([ROWS, PADDED_DIM], tl.float32)
            seen_from = start
            if WINDOW > 0:
                seen_from = tl.minimum(tl.maximum(whole, start), stop)
                for tile in range(tl.maximum(start, window_start(context + begin, WINDOW) // TILE), seen_from):
                    m, total, sums = tile_of(
                        q, tiles, table, tile, position, end, scale, softcap, m, total, sums,
                        NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, True, WINDOW, HAS_CAP,
                    )  # fmt: skip
            for tile in range(seen_from, edge):
                m, total, sums = tile_of(
                    q, tiles, table, tile, position, end, scale, softcap, m, total, sums,
                    NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, False, 0, HAS_CAP,
                )  # fmt: skip
            for tile in range(tl.maximum(edge, seen_from), stop):
                m, total, sums = tile_of(
                    q, tiles, table, tile, position, end, scale, softcap, m, total, sums,
                    NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, True, WINDOW, HAS_CAP,
                )  # fmt: skip
            if SPLITS == 1:
                all_m, all_total, all_sums = merge_unit(all_m, all_total, all_sums, m, total, sums)
            else:
                at = (row * num_units_of_table + unit) * (HEAD_DIM + 2)
                tl.store(out + at[:, None] + d[None, :], sums, mask=is_in)
                tl.store(out + at + HEAD_DIM, m, mask=is_row)
                tl.store(out + at + HEAD_DIM + 1, total, mask=is_row)
        if SPLITS == 1:
            all_total = tl.where(is_row, all_total, 1.0)  # padding rows may be outside of every window
            tl.store(out + row[:, None] * HEAD_DIM + d[None, :], all_sums / all_total[:, None], mask=is_in)
