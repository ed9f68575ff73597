"""Latent attention in absorbed form: all heads read one cached row per position, which is the key, and whose first
elements are the value.

A program has up to ROWS rows: heads of TOKENS tokens of one request. It reads tiles of cached rows once for both
products, with the online softmax, as the kernel of attention.py does. If each request has one token, several programs
share its context (split-KV), and the last of them normalizes, rotates and writes the row of the token first. In other
steps a kernel of its own writes the rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.attention import LOG2_E, MAX_SPLITS, rows_of, tile_of_queries
from engine.ops.cuda.int8_latents import group_numbers, num_groups, put_groups, row_bytes, turned_group_numbers
from engine.ops.cuda.launch import (
    HAS_COPY_ENGINE,
    PDL,
    begin_next,
    kernel,
    next_power_of_2,
    num_sms,
    shared_memory,
    wait_for_inputs,
)
from engine.ops.cuda.prefill_attention import KnownStarts
from engine.ops.cuda.rotate_and_cache import request_of
from engine.ops.cuda.split_kv import combine, merge_unit

MIN_ROWS, MAX_ROWS = 16, 64
MARGIN = 8192  # bytes of shared memory


class LatentTile(NamedTuple):
    """Sizes of a program, and how it runs."""

    rows: int  # at least
    positions: int  # of a tile, at most
    warps: int
    stages: int  # tiles that are read ahead
    per_sm: int  # programs that run at once


DECODE, PREFILL = LatentTile(MIN_ROWS, 64, 4, 2, 1), LatentTile(MAX_ROWS, 64, 8, 2, 1)  # as measured on an H100
FLOAT32 = LatentTile(MIN_ROWS, 16, 4, 1, 1)
# Of tiles of bytes, as measured on an H100: with fewer warps they take too many registers. GPUs with less shared memory
# have no room for 64 positions.
INT8 = {"positions": 64 if HAS_COPY_ENGINE else 32, "warps": 8, "stages": 2}


class LatentStep(NamedTuple):
    """Inputs of latent attention."""

    q_latent: Tensor
    q: Tensor
    latent: Tensor
    norm_weight: Tensor
    cos_sin: Tensor
    kv_cache: Tensor
    where: tuple[Tensor, Tensor, Tensor]  # query_starts, context_lens, block_tables
    num_heads: int

    @classmethod
    def of(cls, arrays: tuple[Tensor, ...], num_heads: int) -> LatentStep:
        q_latent, q, latent, norm_weight, cos_sin, kv_cache, starts, lens, tables = arrays
        where = starts.starts if isinstance(starts, KnownStarts) else starts, lens, tables
        return cls(q_latent, q, latent, norm_weight, cos_sin, kv_cache, where, num_heads)

    def before(self, request: int, token: int) -> tuple[Tensor, ...]:
        """Return all inputs but `q_latent` of the requests before `request`, whose tokens are those before `token`."""
        starts, lens, tables = self.where
        rows = self.q[:token], self.latent[:token], self.norm_weight, self.cos_sin[:token], self.kv_cache
        return *rows, starts[: request + 1], lens[:request], tables[:request]

    @property
    def has_one_each(self) -> bool:
        return len(self.q) == len(self.where[1])

    @property
    def has_int8_cache(self) -> bool:
        return self.kv_cache.dtype == torch.int8

    @property
    def dims(self) -> tuple[int, ...]:
        """Return the numbers of elements that the kernels are compiled for."""
        latent, rope = len(self.norm_weight), self.cos_sin.shape[1]
        return latent, next_power_of_2(max(16, latent)), rope, next_power_of_2(max(16, rope))


def latent_attention(
    *arrays: Tensor, num_heads: int, epsilon: float, scale: float, log_scale: float = 0.0, log_scale_from: int = 1
) -> tuple[Tensor, Tensor]:
    """Compute attention of q_latent [T, H latent] and q [T, H D] over the cache [num_blocks, block_size, latent +
    rope], or of int8 with scales. Return [T, H latent], and the cache, which is updated in place.
    """
    step = LatentStep.of(arrays, num_heads)
    is_small = step.has_one_each and heads_of(num_heads) <= MAX_ROWS // 2
    tile = FLOAT32 if step.q.dtype == torch.float32 else DECODE if is_small else PREFILL
    if not step.has_one_each:
        write_latents(step, epsilon)
    (width, padded, *_), out = step.dims, torch.empty_like(step.q_latent)
    launch = Launch.of(step, tile)
    table_width, block_size = step.where[2].shape[1], step.kv_cache.shape[1]
    splits = launch.splits(table_width * block_size // launch.positions) if step.has_one_each else 1
    partial = launch.partial(splits) if splits > 1 else out
    factors = epsilon, scale * LOG2_E, log_scale
    launch(partial, factors, log_scale_from, splits, num_parts=splits, unit=0, writes=step.has_one_each)
    if splits > 1:
        grid = len(out), num_heads
        combine[grid](partial, out, num_heads, splits, width, padded, splits, num_warps=8, **PDL)
    return out, step.kv_cache


def heads_of(num_heads: int) -> int:
    """Return the number of heads of a program, which divides the number of heads."""
    return next(count for count in range(min(num_heads, MAX_ROWS), 0, -1) if num_heads % count == 0)


def write_latents(step: LatentStep, epsilon: float) -> None:
    """Write the normalized and rotated row of every token to the cache."""
    starts, lens, tables = step.where
    if len(step.latent):
        _write[(len(step.latent),)](
            step.latent, step.norm_weight, step.cos_sin, step.kv_cache, starts, lens, tables, epsilon, len(lens),
            tables.shape[1], *step.dims, step.kv_cache.shape[1], step.has_one_each, num_warps=4, **PDL,
        )  # fmt: skip


class Launch(NamedTuple):
    """Launch of the attention kernel: the heads of a program, its rows, tokens and positions of a tile."""

    step: LatentStep
    tile: LatentTile
    group: int
    rows: int
    tokens: int
    positions: int

    @classmethod
    def of(cls, step: LatentStep, tile: LatentTile) -> Launch:
        group = heads_of(step.num_heads)
        if step.has_int8_cache and tile is not FLOAT32:
            tile = tile._replace(**INT8)
        rows = next_power_of_2(max(group, tile.rows))
        tokens = 1 if step.has_one_each else rows // group
        return cls(step, tile, group, rows, tokens, min(step.kv_cache.shape[1], tile.positions))

    @property
    def grid(self) -> tuple[int, int]:
        num_tokens, num_requests = len(self.step.q), len(self.step.where[1])
        tiles = num_tokens if self.step.has_one_each else num_tokens // self.tokens + num_requests
        return tiles, self.step.num_heads // self.group

    def splits(self, most: int) -> int:
        """Return the number of programs that share a context, a power of two, so that few kernels are compiled."""
        room = self.tile.per_sm * num_sms() // max(1, math.prod(self.grid))
        return 1 << max(1, min(room, most, MAX_SPLITS)).bit_length() - 1

    def partial(self, num_parts: int) -> Tensor:
        """Return the memory of partial results: of each row and part the sums, the largest score and the total
        weight."""
        shape = len(self.step.q), self.step.num_heads, num_parts, self.step.dims[0] + 2
        return self.step.q.new_empty(shape, dtype=torch.float32)

    @property
    def num_stages(self) -> int:
        """Return the number of tiles to read ahead that fit beside the queries and what else a program needs."""
        cache, row = self.step.kv_cache, sum(self.step.dims[1::2])
        rows = self.rows + 2 * self.positions * self.step.has_int8_cache
        room = shared_memory() - MARGIN - rows * row * self.step.q.element_size()
        room //= self.positions * row * cache.element_size()
        return max(1, min(self.tile.stages, room))

    def __call__(self, out: Tensor, factors: tuple[float, ...], log_scale_from: int, splits: int, **parts: Any) -> None:
        """Run the kernel. `factors` are epsilon, the scale with the factor log2(e), and log_scale."""
        step, (starts, lens, tables) = self.step, self.step.where
        if not len(step.q):
            return
        _attend[self.grid[0], self.grid[1], splits](
            step.q_latent, step.q, step.latent, step.norm_weight, step.cos_sin, step.kv_cache, starts, lens, tables,
            out, len(lens), tables.shape[1], parts["num_parts"], *factors, log_scale_from, factors[2] > 0,
            step.num_heads // self.group, self.group, step.q.shape[1] // step.num_heads, *step.dims,
            step.kv_cache.shape[1], self.positions, parts["unit"], self.rows, self.tokens, step.has_one_each, splits,
            parts["writes"], num_warps=self.tile.warps, num_stages=self.num_stages, **PDL,
        )  # fmt: skip


@kernel
def _write(
    latent, norm_weight, cos_sin, cache, query_starts, context_lens, block_tables, epsilon, num_requests, table_width,
    LATENT: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr, PADDED_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ONE_EACH: tl.constexpr,
):  # fmt: skip
    """Write the row of one token."""
    begin_next()
    wait_for_inputs()
    token = tl.program_id(0)
    if ONE_EACH:
        request = token
    else:
        request = request_of(query_starts, num_requests, token, 0)
    position = tl.load(context_lens + request) + token - tl.load(query_starts + request)
    write_row(
        latent, norm_weight, cos_sin, cache, block_tables + request * table_width, token, position, epsilon,
        LATENT, PADDED, ROPE, PADDED_ROPE, BLOCK_SIZE,
    )  # fmt: skip


@triton.jit
def write_row(
    latent, norm_weight, cos_sin, cache, table, token, position, epsilon,
    LATENT: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr, PADDED_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate the row of a token, and write it to the block of its position."""
    c = tl.arange(0, PADDED)
    row = latent + token.to(tl.int64) * (LATENT + ROPE)
    x = tl.load(row + c, mask=c < LATENT, other=0).to(tl.float32)
    x = x / tl.sqrt(tl.sum(x * x, 0) / LATENT + epsilon) * tl.load(norm_weight + c, mask=c < LATENT, other=0)
    r = tl.arange(0, PADDED_ROPE)
    turned = rotated(row + LATENT, cos_sin + token.to(tl.int64) * ROPE, r, r < ROPE, ROPE)
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    IS_INT8: tl.constexpr = cache.dtype.element_ty == tl.int8
    base = cache + block * BLOCK_SIZE * row_bytes(LATENT, ROPE, IS_INT8)
    to = base + position % BLOCK_SIZE * (LATENT + ROPE)
    if IS_INT8:
        scales = (base + BLOCK_SIZE * (LATENT + ROPE)).to(tl.pointer_type(tl.int16))
        scales = scales + position % BLOCK_SIZE
        put_groups(to, scales, x, LATENT, BLOCK_SIZE)
        put_groups(to + LATENT, scales + num_groups(LATENT, 0) * BLOCK_SIZE, turned, ROPE, BLOCK_SIZE)
    else:
        tl.store(to + c, x, mask=c < LATENT)
        tl.store(to + LATENT + r, turned, mask=r < ROPE)


@triton.jit
def rotated(rows, angles, r, is_in, ROPE: tl.constexpr):
    """Return the ROPE elements at `rows`, rotated by halves, f32. The arguments have one shape, or broadcast."""
    half: tl.constexpr = ROPE // 2
    x = tl.load(rows + r, mask=is_in, other=0).to(tl.float32)
    y = tl.load(rows + tl.where(r < half, r + half, r - half), mask=is_in, other=0).to(tl.float32)
    cos = tl.load(angles + r % half, mask=is_in, other=1)
    sin = tl.load(angles + half + r % half, mask=is_in, other=0)
    return x * cos + tl.where(r < half, -1.0, 1.0) * y * sin


@kernel
def _attend(
    q_latent, q, latent, norm_weight, cos_sin, cache, query_starts, context_lens, block_tables, out, num_requests,
    table_width, num_parts, epsilon, scale, log_scale, log_scale_from,
    HAS_LOG: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr, Q_DIM: tl.constexpr, LATENT: tl.constexpr,
    PADDED: tl.constexpr, ROPE: tl.constexpr, PADDED_ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, ONE_EACH: tl.constexpr, SPLITS: tl.constexpr,
    WRITES: tl.constexpr,
):  # fmt: skip
    """Compute GROUP heads of TOKENS tokens of one request, or with several splits partial results of them: of each
    split, or with UNIT of each UNIT positions. `scale` includes the factor log2(e), because powers are of two. WRITES
    says that the row of the token is not in the cache yet.
    """
    begin_next()
    wait_for_inputs()
    split = tl.program_id(2)
    request, first, count, begin = tile_of_queries(query_starts, num_requests, TOKENS, ONE_EACH)
    if begin < count:
        context = tl.load(context_lens + request)
        end = context + tl.minimum(begin + TOKENS, count)
        table = block_tables + request * table_width
        token, row, is_row = rows_of(first, begin, count, NUM_GROUPS, GROUP, ROWS, TOKENS)
        position = context + token
        num_tiles = tl.cdiv(end, TILE)
        edge = (context + begin + 1) // TILE  # tiles that all rows see
        per_part = UNIT // TILE if UNIT > 0 else tl.cdiv(num_tiles, SPLITS)
        if WRITES:
            if (split * per_part < num_tiles) & ((split + 1) * per_part >= num_tiles):
                write_row(
                    latent, norm_weight, cos_sin, cache, table, first, context, epsilon,
                    LATENT, PADDED, ROPE, PADDED_ROPE, BLOCK_SIZE,
                )  # fmt: skip
            tl.debug_barrier()  # what one thread has written others read
        c = tl.arange(0, PADDED)[None, :]
        is_in = is_row[:, None] & (c < LATENT)
        own = tl.load(q_latent + row[:, None] * LATENT + c, mask=is_in, other=0)
        r = tl.arange(0, PADDED_ROPE)[None, :]
        angles = cos_sin + (first + token).to(tl.int64)[:, None] * ROPE
        at = q + row[:, None] * Q_DIM + (Q_DIM - ROPE)
        turned = rotated(at, angles, r, is_row[:, None] & (r < ROPE), ROPE).to(q.dtype.element_ty)
        factor = tl.full([ROWS], 1.0, tl.float32) * scale
        if HAS_LOG:
            factor = factor * (1 + log_scale * tl.log((1 + position // log_scale_from).to(tl.float32)))
        to = out + row[:, None] * LATENT + c
        if UNIT > 0:
            all_m = tl.full([ROWS], -float("inf"), tl.float32)
            all_total = tl.zeros([ROWS], tl.float32)
            all_sums = tl.zeros([ROWS, PADDED], tl.float32)
            each = tl.cdiv(tl.cdiv(num_tiles, per_part), SPLITS)
            for part in range(split * each, tl.minimum(split * each + each, tl.cdiv(num_tiles, per_part))):
                m, total, sums = _sums_of(
                    own, turned, cache, table, part * per_part, edge, tl.minimum((part + 1) * per_part, num_tiles),
                    position, end, factor, LATENT, PADDED, ROPE, PADDED_ROPE, BLOCK_SIZE, TILE, ROWS,
                )  # fmt: skip
                if SPLITS == 1:
                    all_m, all_total, all_sums = merge_unit(all_m, all_total, all_sums, m, total, sums)
                else:
                    _store_part(out, row * num_parts + part, c, m, total, sums, is_row, LATENT)
            if SPLITS == 1:
                all_total = tl.where(is_row, all_total, 1.0)
                tl.store(to, all_sums / all_total[:, None], mask=is_in)
        else:
            m, total, sums = _sums_of(
                own, turned, cache, table, split * per_part, edge, tl.minimum((split + 1) * per_part, num_tiles),
                position, end, factor, LATENT, PADDED, ROPE, PADDED_ROPE, BLOCK_SIZE, TILE, ROWS,
            )  # fmt: skip
            if SPLITS == 1:
                tl.store(to, sums / tl.where(is_row, total, 1.0)[:, None], mask=is_in)
            else:
                _store_part(out, row * num_parts + split, c, m, total, sums, is_row, LATENT)


@triton.jit
def _store_part(out, part, c, m, total, sums, is_row, LATENT: tl.constexpr):
    """Store the partial results of all rows; `part` is the place of each."""
    to = out + part * (LATENT + 2)
    tl.store(to[:, None] + c, sums, mask=is_row[:, None] & (c < LATENT))
    tl.store(to + LATENT, m, mask=is_row)
    tl.store(to + LATENT + 1, total, mask=is_row)


@triton.jit
def _sums_of(
    own, turned, cache, table, start, edge, stop, position, end, factor,
    LATENT: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr, PADDED_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the largest scores, the total weights and the sums over the tiles start .. stop, of which all rows see
    those before `edge`.
    """
    m = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    edge = tl.minimum(tl.maximum(edge, start), stop)
    for tile in range(start, edge):
        m, total, sums = _tile_of(
            own, turned, cache, table, tile, position, end, factor, m, total, sums,
            LATENT, PADDED, ROPE, PADDED_ROPE, BLOCK_SIZE, TILE, False,
        )  # fmt: skip
    for tile in range(edge, stop):
        m, total, sums = _tile_of(
            own, turned, cache, table, tile, position, end, factor, m, total, sums,
            LATENT, PADDED, ROPE, PADDED_ROPE, BLOCK_SIZE, TILE, True,
        )  # fmt: skip
    return m, total, sums


@triton.jit
def _tile_of(
    own, turned, cache, table, tile, position, end, factor, m, total, sums,
    LATENT: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr, PADDED_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Process TILE more positions. At an edge not every row sees all of them, and nothing was ever written behind
    `end`.
    """
    IS_INT8: tl.constexpr = cache.dtype.element_ty == tl.int8
    seen = tile * TILE + tl.arange(0, TILE)
    c = tl.arange(0, PADDED)[None, :]
    r = tl.arange(0, PADDED_ROPE)[None, :]
    block = tl.load(table + tile * TILE // BLOCK_SIZE).to(tl.int64)
    base = cache + block * BLOCK_SIZE * row_bytes(LATENT, ROPE, IS_INT8)
    rows = base + tile * TILE % BLOCK_SIZE * (LATENT + ROPE) + (tl.arange(0, TILE) * (LATENT + ROPE))[:, None]
    if IS_EDGE:
        is_in = (seen < end)[:, None]
        latents = tl.load(rows + c, mask=is_in & (c < LATENT), other=0)
        ropes = tl.load(rows + LATENT + r, mask=is_in & (r < ROPE), other=0)
    elif PADDED == LATENT and PADDED_ROPE == ROPE:
        latents = tl.load(rows + c)
        ropes = tl.load(rows + LATENT + r)
    else:
        latents = tl.load(rows + c, mask=c < LATENT, other=0)
        ropes = tl.load(rows + LATENT + r, mask=r < ROPE, other=0)
    if IS_INT8:
        # Codes of the keys are loaded in their own layout: a load that both products need is not made ahead.
        keys = tl.load(tl.trans(rows) + tl.trans(c), mask=(seen < end)[None, :] & (tl.trans(c) < LATENT), other=0)
        scales = (base + BLOCK_SIZE * (LATENT + ROPE)).to(tl.pointer_type(tl.int16))
        scales = scales + tile * TILE % BLOCK_SIZE + tl.arange(0, TILE)
        keys = turned_group_numbers(keys, scales, seen < end, own, LATENT, BLOCK_SIZE)
        latents = group_numbers(latents, scales, seen < end, own, LATENT, BLOCK_SIZE)
        scales = scales + num_groups(LATENT, 0) * BLOCK_SIZE
        ropes = group_numbers(ropes, scales, seen < end, own, ROPE, BLOCK_SIZE)
    else:
        keys = tl.trans(latents)
    scores = tl.dot(turned, tl.trans(ropes), input_precision="ieee")
    scores = tl.dot(own, keys, scores, input_precision="ieee")
    if IS_EDGE:
        scores = tl.where(seen[None, :] <= position[:, None], scores, -float("inf"))
    largest = tl.maximum(m, tl.max(scores, 1) * factor)
    floor = tl.where(largest == -float("inf"), 0.0, largest)  # of a row that has seen nothing yet
    # Written out, because a compiler could round the product in between at an edge and not elsewhere.
    wide = tl.broadcast_to(factor[:, None], scores.shape)
    weights = tl.exp2(tl.fma(scores, wide, tl.broadcast_to(-floor[:, None], scores.shape)))
    keep = tl.exp2(m - floor)
    total = tl.fma(total, keep, tl.sum(weights, 1))
    sums = tl.dot(weights.to(own.dtype), latents, sums * keep[:, None], input_precision="ieee")
    return largest, total, sums
