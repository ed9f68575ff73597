"""The kernels of experts.py for slots that are sorted by expert."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.fp8_kernels import widened
from engine.ops.cuda.launch import begin_next, kernel, wait_for_inputs
from engine.ops.cuda.lowbit_values import weights_of
from engine.ops.cuda.mxfp4 import ROWS
from engine.ops.cuda.mxfp4_values import mxfp4_parts

DENSE, FP8, INT4, INT8, MXFP4 = 0, 1, 2, 3, 4  # kinds of matrices
IS_FP8, IS_INT4, IS_INT8 = tl.constexpr(FP8), tl.constexpr(INT4), tl.constexpr(INT8)
IS_MXFP4, MXFP4_ROWS = tl.constexpr(MXFP4), tl.constexpr(ROWS)


@kernel
def grouped(
    x, slots, starts, weight, table, scale, zero, bias, slot_weights, out, limit, alpha, offset,
    num_blocks, columns, width, num_words, num_experts,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr, IS_BLOCKED: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr,
    IS_WHOLE: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WORDS: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr, UNIT: tl.constexpr, IS_SORTED: tl.constexpr,
):  # fmt: skip
    """Multiply up to SLOTS slots of one expert by COLUMNS rows of its matrix.

    If gated, half of the rows are the gate's and half are those of `up`, and the activation follows. Otherwise the
    products are multiplied by the weights of the slots. Slot s has row s // TOP_K of x. Without IS_SORTED, `starts` has
    the expert of each slot instead, and a block is one slot.
    """
    begin_next()
    wait_for_inputs()
    OWN: tl.constexpr = COLUMNS // (1 + IS_GATED)
    across = tl.cdiv(columns, OWN)
    group = tl.program_id(0) // (GROUP_SIZE_M * across) * GROUP_SIZE_M
    size = tl.minimum(num_blocks - group, GROUP_SIZE_M)
    index = tl.program_id(0) % (GROUP_SIZE_M * across)
    block = group + index % size
    if IS_SORTED:
        expert, first, end = block_of(starts, block, num_experts, EXPERTS, SLOTS)
    else:
        expert = tl.load(starts + block)
        first, end = block, block + is_here(expert, num_experts).to(tl.int32)
    if first < end:
        m = first + tl.arange(0, SLOTS)
        slot = tl.load(slots + tl.minimum(m, end - 1)) if IS_SORTED else tl.minimum(m, end - 1)
        first_column = index // size * OWN
        i = tl.arange(0, COLUMNS)
        n = tl.minimum(first_column + i % OWN, columns - 1) + i // OWN * columns
        count = columns * (1 + IS_GATED)
        row = expert.to(tl.int64) * count + n
        at_x = x + (slot // TOP_K).to(tl.int64)[:, None] * width
        matrix = weight + distance(table, expert, num_experts, UNIT)
        num_rows = count.to(tl.int64) * num_experts
        if KIND == IS_MXFP4:
            sums = _products_of_mxfp4(
                at_x, m < end, matrix, scale + row, row, width, num_words, num_rows, IS_WHOLE, COLUMNS
            )  # fmt: skip
        else:
            sums = _products(
                at_x, matrix, scale, zero, row, width, num_words, num_rows,
                KIND, IS_BLOCKED, HAS_ZERO, IS_WHOLE, SLOTS, COLUMNS, DEPTH, WORDS,
            )  # fmt: skip
        if (KIND == IS_FP8 and not IS_BLOCKED) or KIND == IS_INT8:
            sums *= tl.load(scale + row)[:, None]
        store_outputs(
            sums, bias + row, slot_weights, out, slot, m < end, first_column, columns, limit, alpha, offset,
            HAS_BIAS, IS_GATED, ACTIVATION, HAS_LIMIT,
        )  # fmt: skip


@triton.jit
def distance(table, expert, num_experts, UNIT: tl.constexpr):
    """Return how far the matrix of an expert is from where it would be in a stack of all experts, in numbers or words.
    UNIT is 0 if there is such a stack, and otherwise the unit of the table."""
    if UNIT == 0:
        return expert.to(tl.int64) * 0
    else:
        return tl.load(table + expert, mask=is_here(expert, num_experts), other=0) * UNIT


@triton.jit
def block_of(starts, block, num_experts, EXPERTS: tl.constexpr, SLOTS: tl.constexpr):
    """Return the expert of a block of slots, its first slot in the order, and the end of the slots of the expert."""
    e = tl.arange(0, EXPERTS)
    begins = tl.load(starts + tl.minimum(e, num_experts))
    ends = tl.load(starts + tl.minimum(e + 1, num_experts))
    blocks = (ends - begins + SLOTS - 1) // SLOTS
    before = tl.cumsum(blocks, 0) - blocks
    is_it = (before <= block) & (block < before + blocks)
    expert = tl.sum(tl.where(is_it, e, 0), 0)
    first = tl.sum(tl.where(is_it, begins + (block - before) * SLOTS, 0), 0)
    return expert, first, tl.sum(tl.where(is_it, ends, 0), 0)


@triton.jit
def _products(
    at_x, weight, scale, zero, row, width, num_words, num_rows,
    KIND: tl.constexpr, IS_BLOCKED: tl.constexpr, HAS_ZERO: tl.constexpr, IS_WHOLE: tl.constexpr,
    SLOTS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Return the sums [COLUMNS, SLOTS] of these rows of the matrices. Packed ones have blocks of DEPTH inputs in WORDS
    words."""
    k = tl.arange(0, DEPTH)
    sums = tl.zeros([COLUMNS, SLOTS], tl.float32)
    for start in range(0, width, DEPTH):
        is_in = IS_WHOLE | (start + k < width)[None, :]
        values = tl.load(at_x + start + k[None, :], mask=is_in, other=0)
        if KIND == 0:
            weights = tl.load(weight + row[:, None] * width + start + k[None, :], mask=is_in, other=0)
            sums = tl.dot(weights.to(values.dtype), tl.trans(values), sums, input_precision="ieee")
        else:
            block = start // DEPTH
            words = tl.load(weight + (row * num_words + block)[:, None] * WORDS + tl.arange(0, WORDS)[None, :])
            if KIND == IS_INT4 or KIND == IS_INT8:
                bits: tl.constexpr = 4 if KIND == IS_INT4 else 8
                weights = weights_of(words, scale, zero, block, row, num_rows, bits, False, HAS_ZERO)
                sums = tl.dot(weights, tl.trans(values.to(weights.dtype)), sums, input_precision="ieee")
            else:
                weights = tl.reshape(tl.permute(tl.join(*widened(words)), (0, 2, 1)), (COLUMNS, DEPTH))
                if IS_BLOCKED:
                    part = tl.dot(weights, tl.trans(values.to(weights.dtype)), input_precision="ieee")
                    sums += part * tl.load(scale + block * num_rows + row)[:, None]
                else:
                    sums = tl.dot(weights, tl.trans(values.to(weights.dtype)), sums, input_precision="ieee")
    return sums


@triton.jit
def _products_of_mxfp4(
    at_x, is_slot, words, at_powers, row, width, num_blocks, num_rows, IS_WHOLE: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the sums [COLUMNS, SLOTS] of these rows of 4-bit floats. Places behind the last slot read no inputs."""
    i = tl.arange(0, 32)[None, :]
    first = row // MXFP4_ROWS * MXFP4_ROWS * num_blocks + row % MXFP4_ROWS
    at_words = words + first[:, None] * 32 + i
    sums = tl.zeros([COLUMNS, is_slot.shape[0]], tl.float32)
    for block in range(0, num_blocks):
        numbers = mxfp4_parts(tl.load(at_words + block * 32 * MXFP4_ROWS), tl.load(at_powers + block * num_rows))
        for part in tl.static_range(4):
            k = block * 128 + part * 32 + i
            values = tl.load(at_x + k, mask=is_slot[:, None] & (IS_WHOLE | (k < width)), other=0)
            own = numbers[part]
            sums = tl.dot(own, tl.trans(values.to(own.dtype)), sums, input_precision="ieee")
    return sums


@triton.jit
def store_outputs(
    sums, at_bias, slot_weights, out, slot, is_slot, first_column, columns, limit, alpha, offset,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr,
):  # fmt: skip
    """Store the products [rows of a matrix, slots] of one expert in `out` [slots, columns]: if gated, after the
    activation, whose gate is the first half of the rows, and otherwise multiplied by the weights of the slots."""
    SLOTS: tl.constexpr = sums.shape[1]
    OWN: tl.constexpr = sums.shape[0] // (1 + IS_GATED)
    if HAS_BIAS:
        sums += tl.load(at_bias).to(tl.float32)[:, None]
    if IS_GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, OWN, SLOTS)), (1, 2, 0)))
        outputs = activated(gate, up, limit, alpha, offset, ACTIVATION, HAS_LIMIT)
    else:
        outputs = sums * tl.load(slot_weights + slot)[None, :]
    own = first_column + tl.arange(0, OWN)
    at = out + slot.to(tl.int64)[None, :] * columns + own[:, None]
    tl.store(at, outputs, mask=is_slot[None, :] & (own < columns)[:, None])


@triton.jit
def activated(gate, up, limit, alpha, offset, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """Return (up + offset) * gate * sigmoid(alpha * gate), or gelu(gate) * up with ACTIVATION 1."""
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    if ACTIVATION == 1:
        return up * gate / (1 + tl.exp(-1.59576912 * (gate + 0.044715 * gate * gate * gate)))
    else:
        return (up + offset) * gate / (1 + tl.exp(-alpha * gate))


@triton.jit
def is_here(expert, num_experts):
    """Return whether this rank has an expert."""
    return (expert >= 0) & (expert < num_experts)


@kernel
def combine(each, topk_ids, out, columns, num_experts, HAS_ALL: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the slots of one token. Without HAS_ALL, some of its experts may belong to other ranks."""
    begin_next()
    wait_for_inputs()
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        is_added = HAS_ALL | is_here(tl.load(topk_ids + row * TOP_K + slot), num_experts)
        at = each + (row * TOP_K + slot) * columns + n
        sums += tl.load(at, mask=is_added & (n < columns), other=0).to(tl.float32)
    tl.store(out + row * columns + n, sums, mask=n < columns)
