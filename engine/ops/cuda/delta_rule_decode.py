"""The kernel of the gated delta rule (delta_rule.py) for steps of one token of each request, which reads the state as
fast as memory allows. The state is stored when a chunk is complete; between, its updates are added where it is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.delta_rule_kernels import (
    CHUNK,
    EPSILON,
    PRECISION,
    factors_at,
    lines_of,
    new_base,
    rows_at,
    scales_of,
    state_at,
)
from engine.ops.cuda.launch import begin_next, kernel, wait_for_inputs
from engine.ops.cuda.states import line_at


@triton.jit
def _close(
    keys, own, factors, head, state, table, key_line, state_line, base, start, first, e, is_e, chunk,
    NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr,
    PER_BLOCK: tl.constexpr, OPEN: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add the updates of the chunk that begins at `chunk` to the columns `e` of the state, and store it."""
    ROW: tl.constexpr = (2 * NUM_K + NUM_V) * WIDTH
    i = tl.arange(0, CHUNK)
    is_in = i < CHUNK
    u = rows_at(
        own, NUM_V * WIDTH, state, table, state_line + WIDTH, base, start, first, chunk + i, is_in,
        e, is_e, WORDS, PER_BLOCK, WIDTH,
    )  # fmt: skip
    g = factors_at(
        factors, head, 0, state, table, state_line + WIDTH + OPEN, base, start, first, chunk + i, is_in,
        NUM_V, WORDS, PER_BLOCK, WIDTH,
    )  # fmt: skip
    total = tl.cumsum(g, 0)
    whole = tl.sum(tl.where(i == CHUNK - 1, total, 0.0), 0)
    every_d = tl.arange(0, PADDED)
    whole_keys = rows_at(
        keys, ROW, state, table, key_line, base, start, first, chunk + i, is_in,
        every_d, every_d < WIDTH, WORDS, PER_BLOCK, WIDTH,
    )  # fmt: skip
    fade = (tl.exp(whole - total) * scales_of(whole_keys))[:, None]
    for depth in range(0, PADDED, DEPTH):
        d = depth + tl.arange(0, DEPTH)
        is_state = (d < WIDTH)[:, None] & is_e[None, :]
        lines = state_at(state, table, state_line, d, e, WORDS, PER_BLOCK, WIDTH)
        s = tl.load(lines, mask=is_state & (chunk > 0), other=0)
        k = rows_at(
            keys, ROW, state, table, key_line, base, start, first, chunk + i, is_in,
            d, d < WIDTH, WORDS, PER_BLOCK, WIDTH,
        )  # fmt: skip
        s = tl.dot(tl.trans(k * fade), u, s * tl.exp(whole), input_precision=PRECISION)
        tl.store(lines, s, mask=is_state)
    tl.debug_barrier()  # what one thread has written others read


@kernel
def advance_one(
    qkv, factors, bases, state, query_starts, context_lens, block_tables, updates, out,
    table_width, FIRST_LINE: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, OPEN: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute what `advance` (delta_rule_chunks.py) does for the only token of a request, in another order of sums."""
    begin_next()
    wait_for_inputs()
    request, head = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = NUM_V // NUM_K
    ROW: tl.constexpr = (2 * NUM_K + NUM_V) * WIDTH
    row = request.to(tl.int64)
    first = tl.load(context_lens + request)
    base = tl.load(bases + request)
    table = block_tables + request * table_width
    key_line, state_line = lines_of(head, FIRST_LINE, GROUP, WIDTH, OPEN)
    d, e = tl.arange(0, PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_d, is_e = d < WIDTH, e < WIDTH
    queries, keys = qkv + head // GROUP * WIDTH, qkv + (NUM_K + head // GROUP) * WIDTH
    own = updates + head * WIDTH
    closed = new_base(base, first, first + 1, 0)
    chunk = base
    if first - base >= CHUNK:
        _close(
            keys, own, factors, head, state, table, key_line, state_line, base, request, first, e, is_e, chunk,
            NUM_K, NUM_V, WIDTH, PADDED, WORDS, PER_BLOCK, OPEN, DEPTH,
        )  # fmt: skip
        chunk += CHUNK
    i = tl.arange(0, CHUNK)
    is_before = chunk + i < first
    is_state = is_d[:, None] & is_e[None, :]
    lines = state_at(state, table, state_line, d, e, WORDS, PER_BLOCK, WIDTH)
    s = tl.load(lines, mask=is_state & (chunk > 0), other=0)
    q = tl.load(queries + row * ROW + d, mask=is_d, other=0).to(tl.float32)
    k = tl.load(keys + row * ROW + d, mask=is_d, other=0).to(tl.float32)
    q *= WIDTH**-0.5 / tl.sqrt(tl.sum(q * q, 0) + EPSILON)
    k *= 1 / tl.sqrt(tl.sum(k * k, 0) + EPSILON)
    line = tl.where(is_before, chunk - base + i, 0)
    at_keys = line_at(state, table, key_line + line, WORDS, PER_BLOCK, WIDTH)
    before = tl.load(at_keys[:, None] + d[None, :], mask=is_before[:, None] & is_d[None, :], other=0)
    at_updates = line_at(state, table, state_line + WIDTH + line, WORDS, PER_BLOCK, WIDTH)
    u = tl.load(at_updates[:, None] + e[None, :], mask=is_before[:, None] & is_e[None, :], other=0)
    decays = line_at(state, table, state_line + WIDTH + OPEN + line // WIDTH, WORDS, PER_BLOCK, WIDTH) + line % WIDTH
    g = tl.load(decays, mask=is_before, other=0)
    factor = factors + row * 2 * NUM_V + head
    whole = tl.sum(g, 0) + tl.load(factor)
    fade = tl.where(is_before, tl.exp(whole - tl.cumsum(g, 0)), 0.0) * scales_of(before)
    with_k = tl.sum(before * k[None, :], 1) * fade
    with_q = tl.sum(before * q[None, :], 1) * fade
    k_read = tl.sum(s * k[:, None], 0) * tl.exp(whole) + tl.sum(u * with_k[:, None], 0)
    q_read = tl.sum(s * q[:, None], 0) * tl.exp(whole) + tl.sum(u * with_q[:, None], 0)
    value = tl.load(qkv + row * ROW + (2 * NUM_K + head) * WIDTH + e, mask=is_e, other=0)
    update = tl.load(factor + NUM_V) * (value.to(tl.float32) - k_read)
    tl.store(own + row * NUM_V * WIDTH + e, update, mask=is_e)
    tl.store(out + row * NUM_V * WIDTH + head * WIDTH + e, q_read + tl.sum(q * k, 0) * update, mask=is_e)
    if closed == first + 1:
        tl.debug_barrier()  # the update is read again
        _close(
            keys, own, factors, head, state, table, key_line, state_line, base, request, first, e, is_e, chunk,
            NUM_K, NUM_V, WIDTH, PADDED, WORDS, PER_BLOCK, OPEN, DEPTH,
        )  # fmt: skip
