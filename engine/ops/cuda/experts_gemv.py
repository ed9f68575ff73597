"""Products of one token with matrices of its experts in 4 or 8 bits, in integers as gemv.py computes one row. Each slot
reads its expert's rows. Groups of rows are loaded into shared memory while those before are multiplied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.experts_kernels import INT4, INT8, activated, distance, is_here
from engine.ops.cuda.gemv import (
    ORIGIN_BITS,
    REGISTERS,
    GemvTile,
    codes_at,
    products,
    rows_of,
    scales_at,
    sums_of,
    tile_for,
    whole_parts,
)
from engine.ops.cuda.launch import PDL, begin_next, cdiv, fetch_ahead, kernel, next_power_of_2, num_sms, wait_for_inputs
from engine.ops.cuda.routing import num_experts_of

if TYPE_CHECKING:
    from engine.ops.cuda.experts import ExpertWeights

CHUNKS_OF_BLOCK, WORDS_OF_BLOCK = 8, 64  # a chunk is 16 bytes of a row of weights
MOST_CHUNKS = 1024  # of all slots of a token, which a program of `down` has together
ALIGNED = 8  # words of a chunk; matrices of experts begin at a multiple of so many
REGISTERS_EACH = 112  # of a thread: with fewer, some are spilled to memory
GATE_UP_ROWS, THREAD_CHUNKS = 4, 2  # rows of weights of a program of `gate_up`, and chunks of a row that a thread has
MOST_PROGRAMS = 8  # of an SM
STAGES = 3  # groups of rows of a program of which one is multiplied and the others are being loaded


def can_multiply(stored: ExpertWeights, top_k: int) -> bool:
    """Return whether the kernels have tiles for these matrices and as many slots of a token."""
    if stored.kind not in (INT4, INT8) or stored.weight.shape[2] != WORDS_OF_BLOCK:
        return False
    return _slots(top_k) * _chunks(stored) <= MOST_CHUNKS


def gate_up(x: Tensor, topk_ids: Tensor, stored: ExpertWeights, out: Tensor, **act: Any) -> None:
    """Store the activations [T, top_k * F] of the experts of each row of x in `out`."""
    (num_rows, top_k), bits = topk_ids.shape, _bits(stored)
    columns, num_slots = out.shape[1] // top_k, num_rows * top_k
    if num_rows:
        chunks = max(32, _chunks(stored))
        tile = GemvTile(chunks, GATE_UP_ROWS, cdiv(chunks, 32 * THREAD_CHUNKS), REGISTERS_EACH)
        groups = cdiv(columns, tile.rows // 2)
        _gate_up[(num_slots, _num_programs(tile, groups, num_slots))](
            x, topk_ids, *_arrays(stored), out, act["limit"], act["alpha"], act["offset"], columns, x.shape[1],
            stored.weight.shape[1], stored.num_rows, groups, top_k, *_experts(stored, topk_ids, 2 * columns), bits,
            stored.zero is not None, stored.bias is not None, act["activation"], act["limit"] > 0, tile.rows,
            tile.chunks, stored.unit, STAGES, num_warps=tile.warps, num_stages=1, maxnreg=tile.registers, **PDL,
        )  # fmt: skip


def down(
    h: Tensor, topk_ids: Tensor, topk_weights: Tensor, stored: ExpertWeights, out: Tensor, *, ids_are_written: bool
) -> None:
    """Store the weighted sums [T, N] of the products of h [T, top_k * K] in `out`. With `ids_are_written`, the ids are
    read before the kernel waits for h.
    """
    (num_rows, top_k), bits, columns = topk_ids.shape, _bits(stored), out.shape[1]
    if num_rows:
        tile = tile_for(_slots(top_k) * _chunks(stored), bits)._replace(registers=REGISTERS_EACH)
        groups = cdiv(columns, tile.rows)
        _down[(num_rows, _num_programs(tile, groups, num_rows))](
            h, topk_ids, topk_weights, *_arrays(stored), out, columns, h.shape[1] // top_k, stored.weight.shape[1],
            stored.num_rows, groups, top_k, *_experts(stored, topk_ids, columns), ids_are_written, bits,
            stored.zero is not None, stored.bias is not None, _slots(top_k), tile.rows, tile.chunks, stored.unit,
            STAGES, num_warps=tile.warps, num_stages=1, maxnreg=tile.registers, **PDL,
        )  # fmt: skip


def _bits(stored: ExpertWeights) -> int:
    return 4 if stored.kind == INT4 else 8


def _slots(top_k: int) -> int:
    return next_power_of_2(top_k)


def _chunks(stored: ExpertWeights) -> int:
    """Return the number of chunks of a row, rounded up to a power of two."""
    return next_power_of_2(stored.weight.shape[1] * CHUNKS_OF_BLOCK)


def _num_programs(tile: GemvTile, groups: int, times: int) -> int:
    """Return how many programs share the groups of rows, if `times` as many run at once."""
    per_sm = min(REGISTERS // (32 * tile.warps * tile.registers), MOST_PROGRAMS)
    return min(groups, cdiv(per_sm * num_sms(), times))


def _arrays(stored: ExpertWeights) -> tuple[Tensor, ...]:
    """Return words, table, scales, zero points and biases. Those that are missing are not read."""
    assert stored.scale is not None and stored.unit % ALIGNED == 0
    others = (stored.scale if each is None else each for each in (stored.zero, stored.bias))
    return stored.weight, stored.table, stored.scale, *others


def _experts(stored: ExpertWeights, topk_ids: Tensor, rows_of_each: int) -> tuple[int, bool]:
    """Return the number of experts of this rank, and whether these are all."""
    num_experts = stored.num_rows // rows_of_each
    return num_experts, num_experts == num_experts_of(topk_ids)


@kernel
def _gate_up(
    x, topk_ids, words, table, scale, zero, bias, out, limit, alpha, offset, columns, width, num_blocks, num_rows,
    groups, top_k, num_experts, HAS_ALL: tl.constexpr, BITS: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute groups of half as many outputs of one slot as ROWS. The next kernel begins after the wait, so that it may
    read the ids of the experts at once.
    """
    OWN: tl.constexpr = ROWS // 2
    wait_for_inputs()
    begin_next()
    slot, step = tl.program_id(0), tl.num_programs(1)
    expert = tl.load(topk_ids + slot)
    if HAS_ALL | is_here(expert, num_experts):
        # The rows of the expert. Scales of 4 bits are eight bytes for each row.
        first = expert.to(tl.int64) * columns * 2
        words += first * num_blocks * 64 + distance(table, expert, num_experts, UNIT)
        scale += first
        zero += first
        bias += first
        at_x = x + (slot // top_k).to(tl.int64) * width
        x0, x1, x2, x3, total, unit = whole_parts(at_x, width, tl.arange(0, 8 * CHUNKS), BITS, CHUNKS)
        start = total * (-8 if BITS == 4 else 0) + ORIGIN_BITS
        for group in tl.range(tl.program_id(1), groups, step, num_stages=STAGES):
            row = rows_of(group, columns, True, ROWS)
            own = codes_at(words, row, num_blocks, CHUNKS)
            scales = scales_at(scale, row, num_rows, num_blocks, BITS, CHUNKS)
            zeros = scales_at(zero, row, num_rows, num_blocks, BITS, CHUNKS) if HAS_ZERO else scales
            found = products(own, x0, x1, x2, x3, start, BITS)
            y = sums_of(found, scales, zeros, total, unit, BITS == 4, HAS_ZERO)
            if BITS == 8:
                y *= tl.load(scale + row)
            if HAS_BIAS:
                y += tl.load(bias + row).to(tl.float32)
            gate, up = tl.split(tl.permute(tl.reshape(y, (2, OWN)), (1, 0)))
            n = group * OWN + tl.arange(0, OWN)
            result = activated(gate, up, limit, alpha, offset, ACTIVATION, HAS_LIMIT)
            tl.store(out + slot.to(tl.int64) * columns + n, result, mask=n < columns)


@kernel
def _down(
    h, topk_ids, topk_weights, words, table, scale, zero, bias, out, columns, width, num_blocks, num_rows, groups,
    top_k, num_experts, HAS_ALL: tl.constexpr, ARE_WRITTEN: tl.constexpr, BITS: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, UNIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute groups of ROWS outputs of one token, as if the rows of its experts were one row of CHUNKS. Inputs of
    slots behind the last one and of other ranks are 0, and no words are read for them.
    """
    begin_next()
    if not ARE_WRITTEN:
        wait_for_inputs()
    OF_SLOT: tl.constexpr = CHUNKS // SLOTS
    token, step = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    slot = token * top_k + tl.minimum(tl.arange(0, SLOTS), top_k - 1)
    expert = tl.load(topk_ids + slot)
    is_slot = tl.arange(0, SLOTS) < top_k
    if not HAS_ALL:
        is_slot &= is_here(expert, num_experts)
        expert = tl.where(is_slot, expert, 0)
    first_row = expert.to(tl.int64) * columns
    i = tl.arange(0, 4 * OF_SLOT)[None, :]
    chunk = tl.minimum(i // 4, num_blocks * 8 - 1)
    at_slot = (first_row * (num_blocks * 32) + distance(table, expert, num_experts, UNIT // 2))[:, None]
    at_words = at_slot + chunk * 4 + i % 4
    at_scale = first_row[:, None] * 4 + (chunk // 8).to(tl.int64) * num_rows * 4 + i % 4
    if ARE_WRITTEN:
        if UNIT == 0:  # host memory may not be cached
            for group in range(tl.program_id(1), tl.minimum(groups, (STAGES - 1) * step), step):
                row = tl.minimum(group * ROWS + tl.arange(0, ROWS), columns - 1)
                _prefetch(words, at_slot, row, is_slot, num_blocks, scale, OF_SLOT // 8)
        wait_for_inputs()
    num_inputs = tl.where(is_slot, width, 0)[:, None]
    word = tl.arange(0, 8 * OF_SLOT)[None, :]
    x0, x1, x2, x3, total, unit = whole_parts(h + (slot * width)[:, None], num_inputs, word, BITS, CHUNKS)
    factor = tl.load(topk_weights + slot, mask=is_slot, other=0)
    unit *= tl.reshape(tl.broadcast_to(factor[:, None], (SLOTS, OF_SLOT)), (1, CHUNKS, 1))
    start = total * (-8 if BITS == 4 else 0) + ORIGIN_BITS
    for group in tl.range(tl.program_id(1), groups, step, num_stages=STAGES):
        n = group * ROWS + tl.arange(0, ROWS)
        row = tl.minimum(n, columns - 1)
        own = _codes_of_slots(words, at_words, is_slot, row, num_blocks, CHUNKS)
        if BITS == 4:
            scales = _scales_of_slots(scale, at_scale, row, CHUNKS)
            zeros = _scales_of_slots(zero, at_scale, row, CHUNKS) if HAS_ZERO else scales
        else:
            of_rows = tl.load(scale + first_row[None, :] + row[:, None])[:, :, None]
            scales = tl.reshape(tl.broadcast_to(of_rows, (ROWS, SLOTS, OF_SLOT)), (ROWS, CHUNKS, 1))
            zeros = scales
        y = sums_of(products(own, x0, x1, x2, x3, start, BITS), scales, zeros, total, unit, True, HAS_ZERO)
        if HAS_BIAS:
            y += tl.sum(tl.load(bias + first_row[None, :] + row[:, None]).to(tl.float32) * factor[None, :], 1)
        tl.store(out + token * columns + n, y, mask=n < columns)


@triton.jit
def _prefetch(words, at_words, row, is_slot, num_blocks, instead, BLOCKS: tl.constexpr):
    """Prefetch the words of these rows into the L2 cache; `instead` in place of those of slots that are not read."""
    line = tl.minimum(tl.arange(0, BLOCKS), num_blocks - 1)[None, None, :] * 32
    at = at_words[None, :, :] + line + (row.to(tl.int64) * (num_blocks * 32))[:, None, None]
    address = (words.to(tl.pointer_type(tl.int32)) + at).to(tl.int64)
    fetch_ahead(tl.where(is_slot[None, :, None], address, instead.to(tl.int64)))


@triton.jit
def _codes_of_slots(words, at_words, is_slot, row, num_blocks, CHUNKS: tl.constexpr):
    """Load codes as i32 [rows, chunks, 4], 16 bytes at a time."""
    at = at_words[None, :, :] + (row.to(tl.int64) * (num_blocks * 32))[:, None, None]
    at = tl.max_contiguous(tl.multiple_of(at, (1, 1, 4)), (1, 1, 4))
    loaded = tl.load(words.to(tl.pointer_type(tl.int32)) + at, mask=is_slot[None, :, None], other=0)
    return tl.reshape(loaded, (row.shape[0], CHUNKS, 4))


@triton.jit
def _scales_of_slots(scale, at_scale, row, CHUNKS: tl.constexpr):
    """Load scales as bf16 [rows, chunks, 4]."""
    at = at_scale[None, :, :] + (row * 4)[:, None, None]
    at = tl.max_contiguous(tl.multiple_of(at, (1, 1, 4)), (1, 1, 4))
    return tl.reshape(tl.load(scale.to(tl.pointer_type(tl.bfloat16)) + at), (row.shape[0], CHUNKS, 4))
