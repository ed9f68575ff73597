"""The kernels of the gated delta rule (delta_rule.py) that prepare a step, compute one token, and keep open positions.

Positions that earlier steps computed are in the lines of the state, from the position `base` on, at whose beginning the
stored state is: their keys, updates, values, decays and betas. Positions of this step are in `inputs` (normalized
queries and keys), `factors` (decays, then beta), `qkv` (values) and `updates`, one row each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.launch import begin_next, kernel, wait_for_inputs
from engine.ops.cuda.rotate_and_cache import request_of
from engine.ops.cuda.states import line_at

PRECISION = tl.constexpr("tf32x3")  # of the matrix products: that of float32
CHUNK = tl.constexpr(16)  # positions between two states
KEPT = tl.constexpr(32)  # lines of a value head for updates, then as many for values


@kernel
def prepare(
    qkv, gates, a_log, dt_bias, state, query_starts, context_lens, block_tables, inputs, factors, bases, num_requests,
    table_width, FIRST_LINE: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, OPEN: tl.constexpr,
    ONE_EACH: tl.constexpr, HEADS: tl.constexpr, PADDED_V: tl.constexpr,
):  # fmt: skip
    """Normalize HEADS queries and keys of one token. The first program of a token also computes its decays and betas,
    and that of a request's first token finds the position of the stored state.
    """
    begin_next()
    wait_for_inputs()
    token = tl.program_id(0)
    head, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, PADDED)
    row = token.to(tl.int64)
    is_in = (head < 2 * NUM_K)[:, None] & (d < WIDTH)[None, :]
    at = head[:, None] * WIDTH + d[None, :]
    x = tl.load(qkv + row * (2 * NUM_K + NUM_V) * WIDTH + at, mask=is_in, other=0).to(tl.float32)
    scale = tl.where(head < NUM_K, WIDTH**-0.5, 1.0) / tl.sqrt(tl.sum(x * x, 1) + 1e-6)
    tl.store(inputs + row * 2 * NUM_K * WIDTH + at, x * scale[:, None], mask=is_in)
    if tl.program_id(1) == 0:
        v = tl.arange(0, PADDED_V)
        is_v = v < NUM_V
        gate = tl.load(gates + row * 2 * NUM_V + v, mask=is_v, other=0).to(tl.float32)
        y = tl.load(gates + row * 2 * NUM_V + NUM_V + v, mask=is_v, other=0).to(tl.float32)
        y += tl.load(dt_bias + v, mask=is_v, other=0)
        decay = -tl.exp(tl.load(a_log + v, mask=is_v, other=0)) * _softplus(y)
        tl.store(factors + row * 2 * NUM_V + v, decay, mask=is_v)
        tl.store(factors + row * 2 * NUM_V + NUM_V + v, 1 / (1 + tl.exp(-gate)), mask=is_v)
        if ONE_EACH:
            request = token
        else:
            request = request_of(query_starts, num_requests, token, 0)
        if tl.load(query_starts + request) == token:
            first = tl.load(context_lens + request)
            base = tl.zeros([1], tl.int32)
            if first > 0:
                # The number of closed chunks is behind the decays of the first value head.
                line = FIRST_LINE + OPEN + WIDTH + OPEN + OPEN // WIDTH + base
                at_count = line_at(state, block_tables + request * table_width, line, WORDS, PER_BLOCK, WIDTH)
                base = tl.load(at_count + OPEN % WIDTH).to(tl.int32) * CHUNK
            # A request that has ended may compute its last position again, which is not used.
            base = tl.where((base > first) | (base + KEPT < first), first // CHUNK * CHUNK, base)
            tl.store(bases + request + tl.arange(0, 1), base)


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), also where exp(x) is far below 1 (Kahan)."""
    y = tl.exp(tl.minimum(x, 20.0))
    u = 1 + y
    log = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1)))
    return tl.where(x > 20.0, x, log)


@triton.jit
def lines_of(head, FIRST_LINE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, OPEN: tl.constexpr):
    """Return the first line of the keys, and of the state of a value head, which its updates and decays follow."""
    size: tl.constexpr = WIDTH + OPEN + (OPEN + WIDTH) // WIDTH
    keys = FIRST_LINE + head // GROUP * (OPEN + GROUP * size)
    return keys, keys + OPEN + head % GROUP * size


@triton.jit
def rows_at(
    new, new_width, state, table, line, base, start, first, position, is_in, columns, is_column,
    WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return columns of keys or updates at positions [N, columns]: of this step from `new`, of earlier ones from the
    lines from `line` on.
    """
    is_old = position < first
    at = tl.where(is_in & is_old, line + position - base, 0)
    old = line_at(state, table, at, WORDS, PER_BLOCK, WIDTH)[:, None] + columns[None, :]
    rows = tl.load(old, mask=(is_in & is_old)[:, None] & is_column[None, :], other=0)
    own = new + (start + position - first).to(tl.int64)[:, None] * new_width + columns[None, :]
    return rows + tl.load(own, mask=(is_in & (position >= first))[:, None] & is_column[None, :], other=0).to(tl.float32)


@triton.jit
def factors_at(
    factors, head, kept, state, table, line, base, start, first, position, is_in,
    NUM_V: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the decays at positions, as `rows_at`, or the betas with `head` + NUM_V and `kept` = KEPT."""
    is_old = is_in & (position < first)
    index = tl.where(is_old, position - base + kept, 0)
    old = line_at(state, table, line + index // WIDTH, WORDS, PER_BLOCK, WIDTH) + index % WIDTH
    own = factors + (start + position - first).to(tl.int64) * 2 * NUM_V + head
    return tl.load(old, mask=is_old, other=0) + tl.load(own, mask=is_in & (position >= first), other=0)


@triton.jit
def new_base(base, first, end, MAX_REJECTED: tl.constexpr):
    """Return the position of the state to store: the last border before positions that may be rejected."""
    return tl.maximum(base, tl.maximum(end - MAX_REJECTED, first + 1) // CHUNK * CHUNK)


@triton.jit
def state_at(state, table, line, d, e, is_in, chunk, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows `d` and columns `e` of the stored state, which is 0 at position 0, and their addresses."""
    lines = line_at(state, table, line + tl.minimum(d, WIDTH - 1), WORDS, PER_BLOCK, WIDTH)[:, None] + e[None, :]
    return tl.load(lines, mask=is_in & (chunk > 0), other=0), lines


@triton.jit
def _close(
    keys, own, factors, head, state, table, key_line, state_line, base, start, first, e, is_e, chunk,
    NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr,
    PER_BLOCK: tl.constexpr, OPEN: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add the updates of the chunk that begins at `chunk` to the columns `e` of the state, and store it."""
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
    fade = tl.exp(whole - total)[:, None]
    for depth in range(0, PADDED, DEPTH):
        d = depth + tl.arange(0, DEPTH)
        is_state = (d < WIDTH)[:, None] & is_e[None, :]
        s, lines = state_at(state, table, state_line, d, e, is_state, chunk, WORDS, PER_BLOCK, WIDTH)
        k = rows_at(
            keys, 2 * NUM_K * WIDTH, state, table, key_line, base, start, first, chunk + i, is_in,
            d, d < WIDTH, WORDS, PER_BLOCK, WIDTH,
        )  # fmt: skip
        s = tl.dot(tl.trans(k * fade), u, s * tl.exp(whole), input_precision=PRECISION)
        tl.store(lines, s, mask=is_state)
    tl.debug_barrier()  # what one thread has written others read


@kernel
def advance_one(
    qkv, inputs, factors, bases, state, query_starts, context_lens, block_tables, updates, out,
    table_width, FIRST_LINE: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, OPEN: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute what `advance` (delta_rule_chunks.py) does for the only token of a request, in another order of sums."""
    begin_next()
    wait_for_inputs()
    request, head = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = NUM_V // NUM_K
    row = request.to(tl.int64)
    first = tl.load(context_lens + request)
    base = tl.load(bases + request)
    table = block_tables + request * table_width
    key_line, state_line = lines_of(head, FIRST_LINE, GROUP, WIDTH, OPEN)
    d, e = tl.arange(0, PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_d, is_e = d < WIDTH, e < WIDTH
    queries, keys = inputs + head // GROUP * WIDTH, inputs + (NUM_K + head // GROUP) * WIDTH
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
    s, _ = state_at(state, table, state_line, d, e, is_state, chunk, WORDS, PER_BLOCK, WIDTH)
    q = tl.load(queries + row * 2 * NUM_K * WIDTH + d, mask=is_d, other=0)
    k = tl.load(keys + row * 2 * NUM_K * WIDTH + d, mask=is_d, other=0)
    line = tl.where(is_before, chunk - base + i, 0)
    at_keys = line_at(state, table, key_line + line, WORDS, PER_BLOCK, WIDTH)
    before = tl.load(at_keys[:, None] + d[None, :], mask=is_before[:, None] & is_d[None, :], other=0)
    at_updates = line_at(state, table, state_line + WIDTH + line, WORDS, PER_BLOCK, WIDTH)
    u = tl.load(at_updates[:, None] + e[None, :], mask=is_before[:, None] & is_e[None, :], other=0)
    decays = line_at(state, table, state_line + WIDTH + OPEN + line // WIDTH, WORDS, PER_BLOCK, WIDTH) + line % WIDTH
    g = tl.load(decays, mask=is_before, other=0)
    factor = factors + row * 2 * NUM_V + head
    whole = tl.sum(g, 0) + tl.load(factor)
    fade = tl.where(is_before, tl.exp(whole - tl.cumsum(g, 0)), 0.0)
    with_k = tl.sum(before * k[None, :], 1) * fade
    with_q = tl.sum(before * q[None, :], 1) * fade
    k_read = tl.sum(s * k[:, None], 0) * tl.exp(whole) + tl.sum(u * with_k[:, None], 0)
    q_read = tl.sum(s * q[:, None], 0) * tl.exp(whole) + tl.sum(u * with_q[:, None], 0)
    value = tl.load(qkv + row * (2 * NUM_K + NUM_V) * WIDTH + (2 * NUM_K + head) * WIDTH + e, mask=is_e, other=0)
    update = tl.load(factor + NUM_V) * (value.to(tl.float32) - k_read)
    tl.store(own + row * NUM_V * WIDTH + e, update, mask=is_e)
    tl.store(out + row * NUM_V * WIDTH + head * WIDTH + e, q_read + tl.sum(q * k, 0) * update, mask=is_e)
    if closed == first + 1:
        tl.debug_barrier()  # the update is read again
        _close(
            keys, own, factors, head, state, table, key_line, state_line, base, request, first, e, is_e, chunk,
            NUM_K, NUM_V, WIDTH, PADDED, WORDS, PER_BLOCK, OPEN, DEPTH,
        )  # fmt: skip


@kernel
def keep(
    qkv, inputs, factors, bases, state, query_starts, context_lens, block_tables, updates,
    table_width, FIRST_LINE: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, OPEN: tl.constexpr,
    MAX_REJECTED: tl.constexpr, HAS_UPDATES: tl.constexpr,
):  # fmt: skip
    """Write the keys of a key head, or the values, decays and betas of a value head, of all positions since the stored
    state, as far as they are not in their lines already. Updates are written if HAS_UPDATES; `advance` writes its own.
    """
    begin_next()
    wait_for_inputs()
    request, index = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = NUM_V // NUM_K
    start = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - start
    if count > 0:
        first = tl.load(context_lens + request)
        base = tl.load(bases + request)
        end = first + count
        closed = new_base(base, first, end, MAX_REJECTED)
        table = block_tables + request * table_width
        n, d = tl.arange(0, KEPT), tl.arange(0, PADDED)
        position = closed + n
        is_in = (position < end) & ((position >= first) | (closed > base))
        is_d = d < WIDTH
        if index < NUM_K:
            line, _ = lines_of(index * GROUP, FIRST_LINE, GROUP, WIDTH, OPEN)
            rows = rows_at(
                inputs + (NUM_K + index) * WIDTH, 2 * NUM_K * WIDTH, state, table, line, base, start, first, position,
                is_in, d, is_d, WORDS, PER_BLOCK, WIDTH,
            )  # fmt: skip
        else:
            head = index - NUM_K
            _, line = lines_of(head, FIRST_LINE, GROUP, WIDTH, OPEN)
            line += WIDTH
            decays = factors_at(
                factors, head, 0, state, table, line + OPEN, base, start, first, position, is_in,
                NUM_V, WORDS, PER_BLOCK, WIDTH,
            )  # fmt: skip
            betas = factors_at(
                factors, head + NUM_V, KEPT, state, table, line + OPEN, base, start, first, position, is_in,
                NUM_V, WORDS, PER_BLOCK, WIDTH,
            )  # fmt: skip
            if HAS_UPDATES:
                rows = rows_at(
                    updates + head * WIDTH, NUM_V * WIDTH, state, table, line, base, start, first, position,
                    is_in, d, is_d, WORDS, PER_BLOCK, WIDTH,
                )  # fmt: skip
                tl.debug_barrier()  # all threads have read what is overwritten
                to = line_at(state, table, line + tl.where(is_in, n, 0), WORDS, PER_BLOCK, WIDTH)
                tl.store(to[:, None] + d[None, :], rows, mask=is_in[:, None] & is_d[None, :])
            rows = rows_at(
                qkv + (2 * NUM_K + head) * WIDTH, (2 * NUM_K + NUM_V) * WIDTH, state, table, line + KEPT, base, start,
                first, position, is_in, d, is_d, WORDS, PER_BLOCK, WIDTH,
            )  # fmt: skip
            tl.debug_barrier()  # all threads have read what is overwritten
            at = line + OPEN + tl.where(is_in, n // WIDTH, 0)
            tl.store(line_at(state, table, at, WORDS, PER_BLOCK, WIDTH) + n % WIDTH, decays, mask=is_in)
            at = line + OPEN + tl.where(is_in, (n + KEPT) // WIDTH, 0)
            tl.store(line_at(state, table, at, WORDS, PER_BLOCK, WIDTH) + (n + KEPT) % WIDTH, betas, mask=is_in)
            if head == 0:
                one = tl.zeros([1], tl.int32)
                of_count = line_at(state, table, line + OPEN + OPEN // WIDTH + one, WORDS, PER_BLOCK, WIDTH)
                tl.store(of_count + OPEN % WIDTH, (closed // CHUNK + one).to(tl.float32))
            line += KEPT
        tl.debug_barrier()
        to = line_at(state, table, line + tl.where(is_in, n, 0), WORDS, PER_BLOCK, WIDTH)
        tl.store(to[:, None] + d[None, :], rows, mask=is_in[:, None] & is_d[None, :])
