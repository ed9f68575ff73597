"""The kernel of the gated delta rule (delta_rule.py) for steps of one token of each request, with the convolution
before it and the norm behind it. A program computes a value head and reads its state as fast as memory allows. The
state is stored when a chunk is complete; between, its updates are added where it is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.delta_rule_kernels import (
    CHUNK,
    EPSILON,
    KEPT,
    base_of,
    count_at,
    decay_of,
    factor_at,
    lines_of,
    new_base,
    scales_of,
    state_at,
)
from engine.ops.cuda.launch import begin_next, kernel, wait_for_inputs
from engine.ops.cuda.recurrent_states import line_at


@triton.jit
def _convolved(
    x, taps, state, table, group, first, d, is_d,
    TAPS: tl.constexpr, HISTORY: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return WIDTH channels of `x`, and these convolved and rounded to their type. TAPS = 0: they are convolved."""
    c = group * WIDTH + d
    own = tl.load(x + c, mask=is_d, other=0)
    total = own.to(tl.float32)
    if TAPS > 0:
        total *= tl.load(taps + c * TAPS + TAPS - 1, mask=is_d, other=0)
        for back in tl.static_range(1, TAPS):
            at = line_at(state, table, group * HISTORY + (first - back + HISTORY) % HISTORY, WORDS, PER_BLOCK, WIDTH)
            before = tl.load(at + d, mask=is_d & (first >= back), other=0)
            total += before * tl.load(taps + c * TAPS + TAPS - 1 - back, mask=is_d, other=0)
        total = (total / (1 + tl.exp(-total))).to(x.dtype.element_ty).to(tl.float32)
    return own.to(tl.float32), total


@triton.jit
def _rows_of_state(
    state, table, line, depth, d, is_d, is_there,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return DEPTH rows of the stored state from row `depth` on, or zeros unless `is_there`."""
    row = depth + tl.arange(0, DEPTH)
    at = state_at(state, table, line, row, d, WORDS, PER_BLOCK, WIDTH)
    return tl.load(at, mask=(row < WIDTH)[:, None] & is_d[None, :] & is_there, other=0)


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _products_with_open(
    q, k, state, table, key_line, line, begin, end, decay, d, is_d,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """Return the products of k and q with what the updates of the positions of a chunk from `begin` to `end` add to the
    state, and the decay since `begin`. `decay` is the one since `end`.
    """
    i = tl.arange(0, CHUNK)
    is_before, slots = begin + i < end, (begin + i) % KEPT
    is_in = is_before[:, None] & is_d[None, :]
    at = line_at(state, table, key_line + slots, WORDS, PER_BLOCK, WIDTH)
    keys = tl.load(at[:, None] + d[None, :], mask=is_in, other=0)
    at = line_at(state, table, line + WIDTH + slots, WORDS, PER_BLOCK, WIDTH)
    u = tl.load(at[:, None] + d[None, :], mask=is_in, other=0)
    g = tl.load(factor_at(state, table, line, slots, WORDS, PER_BLOCK, WIDTH, OPEN), mask=is_before, other=0)
    whole = tl.sum(g, 0) + decay
    squares, of_k, of_q = tl.reduce((keys * keys, keys * k[None, :], keys * q[None, :]), 1, _add_three)
    fade = tl.where(is_before, tl.exp(whole - tl.cumsum(g, 0)), 0.0) / tl.sqrt(squares + EPSILON)
    k_sums, q_sums = tl.reduce((u * (of_k * fade)[:, None], u * (of_q * fade)[:, None]), 0, _add_two)
    return k_sums, q_sums, whole


@triton.jit
def _add_chunk(
    state, table, key_line, line, chunk, d, is_d,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, OPEN: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add the updates of the chunk that begins at `chunk` to the stored state."""
    i = tl.arange(0, CHUNK)
    slots = (chunk + i) % KEPT
    at = line_at(state, table, key_line + slots, WORDS, PER_BLOCK, WIDTH)
    keys = tl.load(at[:, None] + d[None, :], mask=is_d[None, :], other=0)
    g = tl.load(factor_at(state, table, line, slots, WORDS, PER_BLOCK, WIDTH, OPEN))
    whole = tl.sum(g, 0)
    # The factors of the updates pass through the line behind the decays and betas, because every thread needs all.
    spare = factor_at(state, table, line, 2 * KEPT + i, WORDS, PER_BLOCK, WIDTH, OPEN)
    tl.store(spare, tl.exp(whole - tl.cumsum(g, 0)) * scales_of(keys))
    tl.debug_barrier()
    for depth in range(0, WIDTH, DEPTH):
        row = depth + tl.arange(0, DEPTH)
        s = _rows_of_state(state, table, line, depth, d, is_d, chunk > 0, WIDTH, WORDS, PER_BLOCK, DEPTH)
        s *= tl.exp(whole)
        for j in tl.range(0, CHUNK, loop_unroll_factor=4):
            slot = (chunk + j) % KEPT
            factor = tl.load(factor_at(state, table, line, 2 * KEPT + j, WORDS, PER_BLOCK, WIDTH, OPEN))
            of_key = line_at(state, table, key_line + slot, WORDS, PER_BLOCK, WIDTH)
            of_update = line_at(state, table, line + WIDTH + slot, WORDS, PER_BLOCK, WIDTH)
            k = tl.load(of_key + row, mask=row < WIDTH, other=0) * factor
            s += k[:, None] * tl.load(of_update + d, mask=is_d, other=0)[None, :]
        to = state_at(state, table, line, row, d, WORDS, PER_BLOCK, WIDTH)
        tl.store(to, s, mask=(row < WIDTH)[:, None] & is_d[None, :])
    tl.debug_barrier()  # what one thread has written others read


@kernel
def decode_step(
    x, taps, gates, a_log, dt_bias, state, context_lens, block_tables, gate, weight, rows, out, epsilon, table_width,
    FIRST_LINE: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, OPEN: tl.constexpr, HISTORY: tl.constexpr, TAPS: tl.constexpr,
    HAS_NORM: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr, CLOSED_DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute what `scan_chunks` (delta_rule_chunks.py) does for the only token of a request, in another order of sums,
    and store what `store_open_positions` does. With TAPS, `x` has the inputs of the convolution, otherwise its outputs.
    DEPTH rows of the state are read at a time, AHEAD times as many of them ahead. `rows` f32 [T, NUM_V, 2, PADDED] is
    memory for queries and keys, of which every thread needs all.
    """
    begin_next()
    wait_for_inputs()
    request, head = tl.program_id(0), tl.program_id(1)
    row = request.to(tl.int64)
    first = tl.load(context_lens + request)
    table = block_tables + request * table_width
    key_line, line = lines_of(head, FIRST_LINE, NUM_V // NUM_K, WIDTH, OPEN)
    d = tl.arange(0, PADDED)
    is_d = d < WIDTH
    # Nothing is stored before all this is loaded, so that the loads wait for the memory together.
    parts = ()
    for step in tl.static_range(AHEAD):
        part = _rows_of_state(state, table, line, step * DEPTH, d, is_d, first > 0, WIDTH, WORDS, PER_BLOCK, DEPTH)
        parts = parts + (part,)  # type: ignore[assignment]
    base = base_of(state, table, line, first, WORDS, PER_BLOCK, WIDTH, OPEN)
    x += row * (2 * NUM_K + NUM_V) * WIDTH
    of_query, of_key, of_value = head // (NUM_V // NUM_K), NUM_K + head // (NUM_V // NUM_K), 2 * NUM_K + head
    q_in, q = _convolved(x, taps, state, table, of_query, first, d, is_d, TAPS, HISTORY, WORDS, PER_BLOCK, WIDTH)
    k_in, k = _convolved(x, taps, state, table, of_key, first, d, is_d, TAPS, HISTORY, WORDS, PER_BLOCK, WIDTH)
    value_in, value = _convolved(
        x, taps, state, table, of_value, first, d, is_d, TAPS, HISTORY, WORDS, PER_BLOCK, WIDTH
    )
    decay = decay_of(gates + row * 2 * NUM_V + NUM_V + head, a_log + head, dt_bias + head)
    beta = 1 / (1 + tl.exp(-tl.load(gates + row * 2 * NUM_V + head).to(tl.float32)))
    own = rows + (row * NUM_V + head) * 2 * PADDED
    tl.store(own + d, q)
    tl.store(own + PADDED + d, k)
    tl.debug_barrier()
    chunk = first // CHUNK * CHUNK
    of_k, of_q, whole = _products_with_open(
        q, k, state, table, key_line, line, chunk, first, decay, d, is_d, WIDTH, WORDS, PER_BLOCK, OPEN
    )
    if base < chunk:  # behind a prompt or drafts
        more_k, more_q, whole = _products_with_open(
            q, k, state, table, key_line, line, base, chunk, whole, d, is_d, WIDTH, WORDS, PER_BLOCK, OPEN
        )
        of_k += more_k
        of_q += more_q
    qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, _add_three)
    k_sums = tl.zeros([DEPTH, PADDED], tl.float32)
    q_sums = tl.zeros([DEPTH, PADDED], tl.float32)
    for step in tl.static_range(PADDED // DEPTH):
        at = own + step * DEPTH + tl.arange(0, DEPTH)
        q_sums += parts[step] * tl.load(at)[:, None]
        k_sums += parts[step] * tl.load(at + PADDED)[:, None]
        if step + AHEAD < PADDED // DEPTH:
            depth = (step + AHEAD) * DEPTH
            part = _rows_of_state(state, table, line, depth, d, is_d, first > 0, WIDTH, WORDS, PER_BLOCK, DEPTH)
            parts = parts + (part,)  # type: ignore[assignment]
    k_read, q_read = tl.reduce((k_sums, q_sums), 0, _add_two)
    fade = tl.exp(whole)
    k_read, q_read = tl.where(base > 0, k_read * fade, 0.0) + of_k, tl.where(base > 0, q_read * fade, 0.0) + of_q
    q_scale, k_scale = WIDTH**-0.5 / tl.sqrt(qq + EPSILON), 1 / tl.sqrt(kk + EPSILON)
    update = beta * (value - k_read * k_scale)
    y = (q_read + qk * k_scale * update) * q_scale
    at = (row * NUM_V + head) * WIDTH + d
    if HAS_NORM:
        z = tl.load(gate + at, mask=is_d, other=0).to(tl.float32)
        y *= tl.load(weight + d, mask=is_d, other=0) / tl.sqrt(tl.sum(y * y, 0) / WIDTH + epsilon)
        y *= z / (1 + tl.exp(-z))
    tl.store(out + at, y, mask=is_d)
    # The programs of all value heads of a key head write the same queries and keys.
    if TAPS > 0:
        slot = first % HISTORY
        tl.store(line_at(state, table, of_query * HISTORY + slot, WORDS, PER_BLOCK, WIDTH) + d, q_in, mask=is_d)
        tl.store(line_at(state, table, of_key * HISTORY + slot, WORDS, PER_BLOCK, WIDTH) + d, k_in, mask=is_d)
        tl.store(line_at(state, table, of_value * HISTORY + slot, WORDS, PER_BLOCK, WIDTH) + d, value_in, mask=is_d)
    slot = first % KEPT
    tl.store(line_at(state, table, key_line + slot, WORDS, PER_BLOCK, WIDTH) + d, k, mask=is_d)
    tl.store(line_at(state, table, line + WIDTH + slot, WORDS, PER_BLOCK, WIDTH) + d, update, mask=is_d)
    tl.store(line_at(state, table, line + WIDTH + KEPT + slot, WORDS, PER_BLOCK, WIDTH) + d, value, mask=is_d)
    tl.store(factor_at(state, table, line, slot, WORDS, PER_BLOCK, WIDTH, OPEN), decay)
    tl.store(factor_at(state, table, line, KEPT + slot, WORDS, PER_BLOCK, WIDTH, OPEN), beta)
    closed = new_base(base, first, first + 1, 0)
    tl.store(count_at(state, table, line, WORDS, PER_BLOCK, WIDTH, OPEN), (closed // CHUNK).to(tl.float32))
    if closed > base:
        tl.debug_barrier()  # what is kept is read again
        if base < chunk:
            _add_chunk(state, table, key_line, line, base, d, is_d, WIDTH, WORDS, PER_BLOCK, OPEN, CLOSED_DEPTH)
        if closed == first + 1:
            _add_chunk(state, table, key_line, line, chunk, d, is_d, WIDTH, WORDS, PER_BLOCK, OPEN, CLOSED_DEPTH)
