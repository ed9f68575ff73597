"""Latent attention with the products before and after it. Prompts of a step from the first long one on are computed in
expanded form: keys and values of each head are computed from the cached rows, once for all tokens of the step, and
attention has a third of the operations of the absorbed form (mla.py), which all other tokens use.

One kernel copies the cached rows of these requests to one array, request by request. Two products make keys and values
of them, for as many heads at a time as MOST_BYTES allow, and a second kernel computes attention of these heads. The
rotated part of a key is the same for all heads and is read from the copied rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.ops.cuda.attention import LOG2_E
from engine.ops.cuda.head_products import head_linear
from engine.ops.cuda.int8_latents import group_numbers, num_groups, row_bytes
from engine.ops.cuda.launch import (
    HAS_COPY_ENGINE,
    PDL,
    begin_next,
    cdiv,
    kernel,
    next_power_of_2,
    shared_memory,
    wait_for_inputs,
)
from engine.ops.cuda.mla import MARGIN, LatentStep, latent_attention, rotated, write_latents
from engine.ops.cuda.prefill_attention import KnownStarts, PromptChunk
from engine.ops.cuda.rotate_and_cache import request_of

MOST_BYTES = 1 << 28  # of keys and values at a time
COPIED_ROWS = 32  # that a program copies
REQUESTS = 64  # whose contexts are added up at a time


class ExpandedTile(NamedTuple):
    """Sizes of a program, and how it runs."""

    rows: int  # queries
    positions: int  # of a tile
    warps: int
    stages: int  # tiles that are read ahead, at most


LARGE, SMALL, FLOAT32 = ExpandedTile(128, 64, 8, 3), ExpandedTile(64, 32, 4, 2), ExpandedTile(16, 16, 4, 1)


def projected_latent_attention(
    x: Tensor, key_weight: Tensor, *given: Tensor | KnownStarts, num_heads: int, **attributes: Any
) -> tuple[Tensor, Tensor]:
    """Multiply x [T, H D] by the matrices of the heads in `key_weight` [H latent, K], compute latent attention, and
    multiply the results by those in `value_weight` [H N, latent]. Return [T, H N], and the cache, which is updated in
    place.
    """
    *arrays, value_weight = given
    starts, heads = arrays[5], {"num_heads": num_heads}
    if not isinstance(starts, KnownStarts) or not starts.chunks:
        out, cache = latent_attention(head_linear(x, key_weight, **heads), *arrays, **heads, **attributes)
        return head_linear(out, value_weight, **heads), cache
    step = LatentStep.of((x, *arrays), num_heads)
    write_latents(step, attributes["epsilon"])
    y = x.new_empty(len(x), len(value_weight))
    request, begin, *_ = starts.chunks[0]
    if begin:
        before = step.before(request, begin)
        y[:begin] = projected_latent_attention(x[:begin], key_weight, *before, value_weight, **heads, **attributes)[0]
    _attend_to_expanded(step, starts.chunks, key_weight, value_weight, y, attributes)
    return y, step.kv_cache


def _attend_to_expanded(
    step: LatentStep,
    chunks: Sequence[PromptChunk],
    key_weight: Tensor,
    value_weight: Tensor,
    y: Tensor,
    attributes: dict[str, Any],
) -> None:
    """Compute the attention of `chunks`, which are the last requests of the step, in expanded form."""
    first, begin = chunks[0].request, chunks[0].begin
    starts, lens, tables = (each[first:] for each in step.where)
    width, _, rope, _ = step.dims
    rows = _copied(step, chunks, lens, tables, starts)
    latents, num_heads = rows[:, :width], step.num_heads
    of_keys = key_weight.view(num_heads, width, -1)
    of_values = value_weight.view(num_heads, -1, width)
    nope, size = of_keys.shape[2], of_values.shape[1]
    fitting = MOST_BYTES // (len(rows) * (nope + size) * rows.element_size())
    count = next(each for each in range(num_heads, 0, -1) if num_heads % each == 0 and each <= max(1, fitting))
    log_scale, log_scale_from = attributes.get("log_scale", 0.0), attributes.get("log_scale_from", 1)
    sizes = nope, rope, size
    tile = _tile_for(rows.dtype, sizes)
    is_copied = _are_copied(rows.dtype, sizes)
    for head in range(0, num_heads, count):
        keys = rows.new_empty(len(rows), count * nope)
        shared = latents.expand(count, *latents.shape)
        torch.bmm(shared, of_keys[head : head + count], out=keys.view(-1, count, nope).transpose(0, 1))
        values = torch.mm(latents, of_values[head : head + count].reshape(-1, width).t())
        given = keys, rows, values
        if is_copied:
            given = tuple(
                TensorDescriptor.from_tensor(each, [tile.positions, size])
                for each, size in zip(given, (nope, rope, size), strict=True)
            )
        grid = cdiv(len(step.q) - begin, tile.rows) + len(chunks), count
        _attend[grid](
            step.q, step.cos_sin, *given, starts, lens, y, len(chunks), head, count,
            attributes["scale"] * LOG2_E, log_scale, log_scale_from, log_scale > 0,
            num_heads, step.q.shape[1] // num_heads, width, nope, _padded(nope), rope, _padded(rope), size,
            _padded(size), tile.rows, tile.positions, REQUESTS, is_copied,
            num_warps=tile.warps, num_stages=tile.stages, **PDL,
        )  # fmt: skip


def _copied(step: LatentStep, chunks: Sequence[PromptChunk], lens: Tensor, tables: Tensor, starts: Tensor) -> Tensor:
    """Return the cached rows of the requests, as numbers [S, latent + rope]."""
    lengths = [each.context + each.end - each.begin for each in chunks]
    rows = step.q.new_empty(sum(lengths), step.latent.shape[1])
    _copy_rows[cdiv(max(lengths), COPIED_ROWS), len(chunks)](
        step.kv_cache, rows, starts, lens, tables, tables.shape[1], *step.dims, step.kv_cache.shape[1],
        COPIED_ROWS, REQUESTS, num_warps=8, **PDL,
    )  # fmt: skip
    return rows


def _padded(size: int) -> int:
    return next_power_of_2(max(16, size))


def _are_copied(dtype: torch.dtype, sizes: tuple[int, ...]) -> bool:
    """Return whether tiles are loaded by the copy engine, whose boxes have powers of two as sizes."""
    return HAS_COPY_ENGINE and dtype != torch.float32 and all(_padded(size) == size for size in sizes)


def _tile_for(dtype: torch.dtype, sizes: tuple[int, ...]) -> ExpandedTile:
    """Return the tile for keys of sizes[0] + sizes[1] elements and values of sizes[2], with as many stages as fit."""
    if dtype == torch.float32:
        return FLOAT32
    nope, rope, size = map(_padded, sizes)
    for tile in (LARGE, SMALL):
        queries, stage = tile.rows * (nope + rope), tile.positions * (nope + rope + size)
        stages = ((shared_memory() - MARGIN) // dtype.itemsize - queries) // stage
        if stages > 1:
            break
    return tile._replace(stages=max(1, min(tile.stages, stages)))


@triton.jit
def _first_key(query_starts, context_lens, request, REQUESTS: tl.constexpr):
    """Return the place of the first row of a request among the copied rows."""
    count = tl.load(query_starts + request) - tl.load(query_starts)
    i = tl.arange(0, REQUESTS)
    for start in range(0, request, REQUESTS):
        count += tl.sum(tl.load(context_lens + start + i, mask=start + i < request, other=0), 0)
    return count


@kernel
def _copy_rows(
    cache, rows, query_starts, context_lens, block_tables, table_width,
    LATENT: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr, PADDED_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Copy ROWS cached rows of one request."""
    begin_next()
    wait_for_inputs()
    request = tl.program_id(1)
    end = tl.load(context_lens + request) + tl.load(query_starts + request + 1) - tl.load(query_starts + request)
    position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < end:
        IS_INT8: tl.constexpr = cache.dtype.element_ty == tl.int8
        is_row = position < end
        table = block_tables + request * table_width
        block = tl.load(table + position // BLOCK_SIZE, mask=is_row, other=0).to(tl.int64)
        base = cache + block * BLOCK_SIZE * row_bytes(LATENT, ROPE, IS_INT8)
        own = (base + position % BLOCK_SIZE * (LATENT + ROPE))[:, None]
        to = (_first_key(query_starts, context_lens, request, REQUESTS) + position).to(tl.int64) * (LATENT + ROPE)
        to = rows + to[:, None]
        c = tl.arange(0, PADDED)[None, :]
        r = tl.arange(0, PADDED_ROPE)[None, :]
        is_latent, is_rope = is_row[:, None] & (c < LATENT), is_row[:, None] & (r < ROPE)
        latents = tl.load(own + c, mask=is_latent, other=0)
        ropes = tl.load(own + LATENT + r, mask=is_rope, other=0)
        if IS_INT8:
            scales = (base + BLOCK_SIZE * (LATENT + ROPE)).to(tl.pointer_type(tl.int16)) + position % BLOCK_SIZE
            like = tl.zeros([1], rows.dtype.element_ty)
            latents = group_numbers(latents, scales, is_row, like, LATENT, BLOCK_SIZE)
            scales = scales + num_groups(LATENT, 0) * BLOCK_SIZE
            ropes = group_numbers(ropes, scales, is_row, like, ROPE, BLOCK_SIZE)
        tl.store(to + c, latents, mask=is_latent)
        tl.store(to + LATENT + r, ropes, mask=is_rope)


@kernel
def _attend(
    q, cos_sin, keys, rows, values, query_starts, context_lens, out, num_requests, first_head, count, scale, log_scale,
    log_scale_from,
    HAS_LOG: tl.constexpr, NUM_HEADS: tl.constexpr, Q_DIM: tl.constexpr, LATENT: tl.constexpr, NOPE: tl.constexpr,
    PADDED: tl.constexpr, ROPE: tl.constexpr, PADDED_ROPE: tl.constexpr, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, REQUESTS: tl.constexpr, IS_COPIED: tl.constexpr,
):  # fmt: skip
    """Compute one head of ROWS tokens of a request. `count` heads have keys [S, count NOPE] and values [S, count SIZE].
    `scale` includes the factor log2(e), because powers are of two. IS_COPIED says that `keys`, `rows` and `values` are
    tensor descriptors.
    """
    begin_next()
    wait_for_inputs()
    # Programs at the end of a prompt take longest: they begin first.
    index = tl.num_programs(0) - 1 - tl.program_id(0) + tl.load(query_starts) // ROWS
    request = request_of(query_starts, num_requests, index, ROWS)
    first = tl.load(query_starts + request)
    num_tokens = tl.load(query_starts + request + 1) - first
    begin = (index - first // ROWS - request) * ROWS
    if begin < num_tokens:
        context = tl.load(context_lens + request)
        first_key = _first_key(query_starts, context_lens, request, REQUESTS)
        head = tl.program_id(1)
        token = begin + tl.arange(0, ROWS)
        is_row = token < num_tokens
        position = context + token
        end = context + tl.minimum(begin + ROWS, num_tokens)
        row = (first + token).to(tl.int64) * NUM_HEADS + first_head + head
        c = tl.arange(0, PADDED)[None, :]
        own = tl.load(q + row[:, None] * Q_DIM + c, mask=is_row[:, None] & (c < NOPE), other=0)
        r = tl.arange(0, PADDED_ROPE)[None, :]
        angles = cos_sin + (first + token).to(tl.int64)[:, None] * ROPE
        at = q + row[:, None] * Q_DIM + (Q_DIM - ROPE)
        turned = rotated(at, angles, r, is_row[:, None] & (r < ROPE), ROPE).to(q.dtype.element_ty)
        factor = tl.full([ROWS], 1.0, tl.float32) * scale
        if HAS_LOG:
            factor = factor * (1 + log_scale * tl.log((1 + position // log_scale_from).to(tl.float32)))
        m = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, PADDED_SIZE], tl.float32)
        edge = (context + begin + 1) // TILE  # tiles that all rows see
        for tile in range(0, edge):
            m, total, sums = _tile_of(
                own, turned, keys, rows, values, first_key, tile * TILE, position, end, head, count, factor, m, total,
                sums, LATENT, NOPE, PADDED, ROPE, PADDED_ROPE, SIZE, PADDED_SIZE, TILE, False, IS_COPIED,
            )  # fmt: skip
        for tile in range(edge, tl.cdiv(end, TILE)):
            m, total, sums = _tile_of(
                own, turned, keys, rows, values, first_key, tile * TILE, position, end, head, count, factor, m, total,
                sums, LATENT, NOPE, PADDED, ROPE, PADDED_ROPE, SIZE, PADDED_SIZE, TILE, True, IS_COPIED,
            )  # fmt: skip
        n = tl.arange(0, PADDED_SIZE)[None, :]
        sums = sums / tl.where(is_row, total, 1.0)[:, None]
        tl.store(out + row[:, None] * SIZE + n, sums, mask=is_row[:, None] & (n < SIZE))


@triton.jit
def _tile_of(
    own, turned, keys, rows, values, first_key, start, position, end, head, count, factor, m, total, sums,
    LATENT: tl.constexpr, NOPE: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr, PADDED_ROPE: tl.constexpr,
    SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, TILE: tl.constexpr, IS_EDGE: tl.constexpr, IS_COPIED: tl.constexpr,
):  # fmt: skip
    """Process the TILE positions from `start` on. At an edge not every row sees all of them."""
    seen = start + tl.arange(0, TILE)
    if IS_COPIED:
        # Rows behind `end` are those of the next request, or zeros.
        own_keys = keys.load([first_key + start, head * NOPE])
        ropes = rows.load([first_key + start, LATENT])
        own_values = values.load([first_key + start, head * SIZE])
    else:
        c = tl.arange(0, PADDED)[None, :]
        r = tl.arange(0, PADDED_ROPE)[None, :]
        n = tl.arange(0, PADDED_SIZE)[None, :]
        own_keys = _rows_at(keys, first_key, seen, count * NOPE, head * NOPE + c, c < NOPE, end, IS_EDGE)
        ropes = _rows_at(rows, first_key, seen, LATENT + ROPE, LATENT + r, r < ROPE, end, IS_EDGE)
        own_values = _rows_at(values, first_key, seen, count * SIZE, head * SIZE + n, n < SIZE, end, IS_EDGE)
    scores = tl.dot(own, tl.trans(own_keys), input_precision="ieee")
    scores = tl.dot(turned, tl.trans(ropes), scores, input_precision="ieee")
    if IS_EDGE:
        scores = tl.where(seen[None, :] <= position[:, None], scores, -float("inf"))
    largest = tl.maximum(m, tl.max(scores, 1) * factor)  # every row sees the first position
    weights = tl.exp2(scores * factor[:, None] - largest[:, None])
    keep = tl.exp2(m - largest)
    total = total * keep + tl.sum(weights, 1)
    sums = tl.dot(weights.to(own.dtype), own_values, sums * keep[:, None], input_precision="ieee")
    return largest, total, sums


@triton.jit
def _rows_at(numbers, first_key, seen, stride, columns, is_column, end, IS_EDGE: tl.constexpr):
    at = numbers + first_key.to(tl.int64) * stride + seen[:, None] * stride + columns
    if IS_EDGE:
        return tl.load(at, mask=(seen < end)[:, None] & is_column, other=0)
    return tl.load(at, mask=is_column, other=0)
