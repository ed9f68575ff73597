"""The kernels of the gated delta rule (delta_rule.py).

Positions of the open chunk that earlier steps computed are in the lines of the state, from the position `base` on, at
whose beginning the stored state is. Positions of this step are in `inputs` (normalized queries and keys), `factors`
(decays, then beta) and `updates`, one row each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.launch import begin_next, kernel, wait_for_inputs
from engine.ops.cuda.rotate_and_cache import request_of
from engine.ops.cuda.states import line_at

PRECISION = tl.constexpr("tf32x3")  # of the matrix products: that of float32


@kernel
def prepare(
    qkv, gates, a_log, dt_bias, state, query_starts, context_lens, block_tables, inputs, factors, bases, num_requests,
    table_width, FIRST_LINE: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, CHUNK: tl.constexpr, OPEN: tl.constexpr,
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
            base = tl.where((base > first) | (base + OPEN < first), first // CHUNK * CHUNK, base)
            tl.store(bases + request + tl.arange(0, 1), base)


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), also where exp(x) is far below 1 (Kahan)."""
    y = tl.exp(tl.minimum(x, 20.0))
    u = 1 + y
    log = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1)))
    return tl.where(x > 20.0, x, log)


@triton.jit
def _lines_of(head, FIRST_LINE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, OPEN: tl.constexpr):
    """Return the first line of the keys, and of the state of a value head, which its updates and decays follow."""
    size: tl.constexpr = WIDTH + OPEN + (OPEN + WIDTH) // WIDTH
    keys = FIRST_LINE + head // GROUP * (OPEN + GROUP * size)
    return keys, keys + OPEN + head % GROUP * size


@triton.jit
def _rows_at(
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
    return rows + tl.load(own, mask=(is_in & (position >= first))[:, None] & is_column[None, :], other=0)


@triton.jit
def _decays_at(
    factors, head, state, table, line, base, start, first, position, is_in,
    NUM_V: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the decays at positions, as `_rows_at`."""
    is_old = is_in & (position < first)
    index = tl.where(is_old, position - base, 0)
    old = line_at(state, table, line + index // WIDTH, WORDS, PER_BLOCK, WIDTH) + index % WIDTH
    own = factors + (start + position - first).to(tl.int64) * 2 * NUM_V + head
    return tl.load(old, mask=is_old, other=0) + tl.load(own, mask=is_in & (position >= first), other=0)


@triton.jit
def _new_base(base, first, end, MAX_REJECTED: tl.constexpr, CHUNK: tl.constexpr):
    """Return the position of the state to store: the last border before positions that may be rejected."""
    return tl.maximum(base, tl.maximum(end - MAX_REJECTED, first + 1) // CHUNK * CHUNK)


@triton.jit
def _state_at(
    state, table, line, ahead, d, e, is_in, chunk, is_ahead,
    WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return rows `d` and columns `e` of the state at the beginning of the chunk, and both their addresses. At position
    0 they are 0.
    """
    lines = line_at(state, table, line + tl.minimum(d, WIDTH - 1), WORDS, PER_BLOCK, WIDTH)[:, None] + e[None, :]
    others = ahead + d[:, None] * WIDTH + e[None, :]
    rows = tl.load(lines, mask=is_in & (chunk > 0) & (is_ahead == 0), other=0)
    return rows + tl.load(others, mask=is_in & is_ahead, other=0), lines, others


@triton.jit
def _close(
    keys, own, factors, head, state, table, key_line, state_line, base, start, first, ahead, e, is_e, chunk, new_base,
    NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr,
    PER_BLOCK: tl.constexpr, CHUNK: tl.constexpr, OPEN: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add the updates of the chunk that begins at `chunk` to the columns `e` of the state, and store it: in its lines,
    or in `ahead` if a position of the chunk may be rejected.
    """
    i = tl.arange(0, CHUNK)
    is_in, is_ahead = i < CHUNK, chunk + CHUNK > new_base
    u = _rows_at(
        own, NUM_V * WIDTH, state, table, state_line + WIDTH, base, start, first, chunk + i, is_in,
        e, is_e, WORDS, PER_BLOCK, WIDTH,
    )  # fmt: skip
    g = _decays_at(
        factors, head, state, table, state_line + WIDTH + OPEN, base, start, first, chunk + i, is_in,
        NUM_V, WORDS, PER_BLOCK, WIDTH,
    )  # fmt: skip
    total = tl.cumsum(g, 0)
    whole = tl.sum(tl.where(i == CHUNK - 1, total, 0.0), 0)
    fade = tl.exp(whole - total)[:, None]
    for depth in range(0, PADDED, DEPTH):
        d = depth + tl.arange(0, DEPTH)
        is_state = (d < WIDTH)[:, None] & is_e[None, :]
        s, lines, others = _state_at(
            state, table, state_line, ahead, d, e, is_state, chunk, chunk > new_base, WORDS, PER_BLOCK, WIDTH
        )
        k = _rows_at(
            keys, 2 * NUM_K * WIDTH, state, table, key_line, base, start, first, chunk + i, is_in,
            d, d < WIDTH, WORDS, PER_BLOCK, WIDTH,
        )  # fmt: skip
        s = tl.dot(tl.trans(k * fade), u, s * tl.exp(whole), input_precision=PRECISION)
        tl.store(lines, s, mask=is_state & (is_ahead == 0))
        tl.store(others, s, mask=is_state & is_ahead)
    tl.debug_barrier()  # what one thread has written others read


@kernel
def advance_one(
    qkv, inputs, factors, bases, state, query_starts, context_lens, block_tables, updates, ahead, out,
    table_width, FIRST_LINE: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, CHUNK: tl.constexpr, OPEN: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute what `advance` does for the only token of a request, in another order of sums."""
    begin_next()
    wait_for_inputs()
    request, head = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = NUM_V // NUM_K
    row = request.to(tl.int64)
    first = tl.load(context_lens + request)
    base = tl.load(bases + request)
    table = block_tables + request * table_width
    key_line, state_line = _lines_of(head, FIRST_LINE, GROUP, WIDTH, OPEN)
    d, e = tl.arange(0, PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_d, is_e = d < WIDTH, e < WIDTH
    queries, keys = inputs + head // GROUP * WIDTH, inputs + (NUM_K + head // GROUP) * WIDTH
    own = updates + head * WIDTH
    new_base = _new_base(base, first, first + 1, 0, CHUNK)
    chunk = base
    if first - base >= CHUNK:
        _close(
            keys, own, factors, head, state, table, key_line, state_line, base, request, first, ahead, e, is_e,
            chunk, new_base, NUM_K, NUM_V, WIDTH, PADDED, WORDS, PER_BLOCK, CHUNK, OPEN, DEPTH,
        )  # fmt: skip
        chunk += CHUNK
    i = tl.arange(0, CHUNK)
    is_before = chunk + i < first
    s, _, _ = _state_at(
        state, table, state_line, ahead, d, e, is_d[:, None] & is_e[None, :], chunk, chunk < 0, WORDS, PER_BLOCK, WIDTH
    )
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
    if new_base == first + 1:
        tl.debug_barrier()  # the update is read again
        _close(
            keys, own, factors, head, state, table, key_line, state_line, base, request, first, ahead, e, is_e,
            chunk, new_base, NUM_K, NUM_V, WIDTH, PADDED, WORDS, PER_BLOCK, CHUNK, OPEN, DEPTH,
        )  # fmt: skip


@kernel
def advance(
    qkv, inputs, factors, bases, state, query_starts, context_lens, block_tables, updates, ahead, out,
    table_width, FIRST_LINE: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, CHUNK: tl.constexpr, OPEN: tl.constexpr,
    MAX_REJECTED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS columns of a value head for all tokens of a request, and its state behind them. A state behind
    positions that may be rejected is not stored in its lines but in `ahead`.
    """
    begin_next()
    wait_for_inputs()
    request, head = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = NUM_V // NUM_K
    start = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - start
    if count > 0:
        first = tl.load(context_lens + request)
        base = tl.load(bases + request)
        end = first + count
        table = block_tables + request * table_width
        key_line, state_line = _lines_of(head, FIRST_LINE, GROUP, WIDTH, OPEN)
        update_line = state_line + WIDTH
        e = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        is_e = e < WIDTH
        queries, keys = inputs + head // GROUP * WIDTH, inputs + (NUM_K + head // GROUP) * WIDTH
        own = updates + head * WIDTH
        ahead += (request * NUM_V + head).to(tl.int64) * WIDTH * WIDTH
        new_base = _new_base(base, first, end, MAX_REJECTED, CHUNK)
        chunk = base  # position at whose beginning the state is
        n, i = tl.arange(0, BLOCK), tl.arange(0, CHUNK)
        for block in range(first // BLOCK, tl.cdiv(end, BLOCK) + (new_base == end).to(tl.int32)):
            begin = block * BLOCK
            if begin // CHUNK * CHUNK > chunk:
                _close(
                    keys, own, factors, head, state, table, key_line, state_line, base, start, first, ahead, e, is_e,
                    chunk, new_base, NUM_K, NUM_V, WIDTH, PADDED, WORDS, PER_BLOCK, CHUNK, OPEN, DEPTH,
                )  # fmt: skip
                chunk = begin // CHUNK * CHUNK
            position = begin + n
            is_new, is_old = (position >= first) & (position < end), position < first
            row = (start + position - first).to(tl.int64)
            is_before = chunk + i < begin
            # What the positions read from the state, and their products with keys of the chunk: of earlier blocks, and
            # of their own.
            k_read = tl.zeros([BLOCK, COLUMNS], tl.float32)
            q_read = tl.zeros([BLOCK, COLUMNS], tl.float32)
            k_before = tl.zeros([BLOCK, CHUNK], tl.float32)
            q_before = tl.zeros([BLOCK, CHUNK], tl.float32)
            k_scores = tl.zeros([BLOCK, BLOCK], tl.float32)
            q_scores = tl.zeros([BLOCK, BLOCK], tl.float32)
            for depth in range(0, PADDED, DEPTH):
                d = depth + tl.arange(0, DEPTH)
                s, _, _ = _state_at(
                    state, table, state_line, ahead, d, e, (d < WIDTH)[:, None] & is_e[None, :], chunk,
                    chunk > new_base, WORDS, PER_BLOCK, WIDTH,
                )  # fmt: skip
                k = _rows_at(
                    keys, 2 * NUM_K * WIDTH, state, table, key_line, base, start, first, position, position < end,
                    d, d < WIDTH, WORDS, PER_BLOCK, WIDTH,
                )  # fmt: skip
                before = _rows_at(
                    keys, 2 * NUM_K * WIDTH, state, table, key_line, base, start, first, chunk + i, is_before,
                    d, d < WIDTH, WORDS, PER_BLOCK, WIDTH,
                )  # fmt: skip
                is_query = is_new[:, None] & (d < WIDTH)[None, :]
                q = tl.load(queries + row[:, None] * 2 * NUM_K * WIDTH + d[None, :], mask=is_query, other=0)
                k_read = tl.dot(k, s, k_read, input_precision=PRECISION)
                q_read = tl.dot(q, s, q_read, input_precision=PRECISION)
                k_before = tl.dot(k, tl.trans(before), k_before, input_precision=PRECISION)
                q_before = tl.dot(q, tl.trans(before), q_before, input_precision=PRECISION)
                k_scores = tl.dot(k, tl.trans(k), k_scores, input_precision=PRECISION)
                q_scores = tl.dot(q, tl.trans(k), q_scores, input_precision=PRECISION)
            g = _decays_at(
                factors, head, state, table, update_line + OPEN, base, start, first, chunk + i, chunk + i < end,
                NUM_V, WORDS, PER_BLOCK, WIDTH,
            )  # fmt: skip
            total = tl.cumsum(g, 0)
            here = tl.sum(tl.where((chunk + i)[None, :] == position[:, None], total[None, :], 0.0), 1)
            kept = tl.exp(here)[:, None]
            decay = tl.where(is_before[None, :], tl.exp(tl.minimum(here[:, None] - total[None, :], 0.0)), 0.0)
            u = _rows_at(
                own, NUM_V * WIDTH, state, table, update_line, base, start, first, chunk + i, is_before,
                e, is_e, WORDS, PER_BLOCK, WIDTH,
            )  # fmt: skip
            k_read = tl.dot(k_before * decay, u, k_read * kept, input_precision=PRECISION)
            q_read = tl.dot(q_before * decay, u, q_read * kept, input_precision=PRECISION)
            decay = tl.exp(tl.minimum(here[:, None] - here[None, :], 0.0))
            k_scores = k_scores * decay
            q_scores = q_scores * decay
            is_own = is_new[:, None] & is_e[None, :]
            value = qkv + row[:, None] * (2 * NUM_K + NUM_V) * WIDTH + (2 * NUM_K + head) * WIDTH + e[None, :]
            value = tl.load(value, mask=is_own, other=0).to(tl.float32)
            beta = tl.load(factors + row * 2 * NUM_V + NUM_V + head, mask=is_new, other=0)[:, None]
            old = _rows_at(
                own, NUM_V * WIDTH, state, table, update_line, base, start, first, position, is_old,
                e, is_e, WORDS, PER_BLOCK, WIDTH,
            )  # fmt: skip
            for j in range(0, tl.minimum(end - begin, BLOCK)):
                rows = tl.where(is_new[:, None], beta * (value - k_read), old)
                update = tl.sum(tl.where((n == j)[:, None], rows, 0.0), 0)[None, :]
                is_j = (n == j)[None, :]
                with_k = tl.sum(tl.where(is_j & (n > j)[:, None], k_scores, 0.0), 1)
                with_q = tl.sum(tl.where(is_j & (n >= j)[:, None], q_scores, 0.0), 1)
                k_read += with_k[:, None] * update
                q_read += with_q[:, None] * update
            tl.store(own + row[:, None] * NUM_V * WIDTH + e[None, :], beta * (value - k_read), mask=is_own)
            tl.store(out + row[:, None] * NUM_V * WIDTH + head * WIDTH + e[None, :], q_read, mask=is_own)
            tl.debug_barrier()  # what one thread has written others read


@kernel
def keep(
    inputs, factors, bases, state, query_starts, context_lens, block_tables, updates,
    table_width, FIRST_LINE: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, CHUNK: tl.constexpr, OPEN: tl.constexpr,
    MAX_REJECTED: tl.constexpr, PADDED_OPEN: tl.constexpr,
):  # fmt: skip
    """Write the keys of a key head, or the updates and decays of a value head, of all positions since the stored state,
    as far as they are not in their lines already.
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
        new_base = _new_base(base, first, end, MAX_REJECTED, CHUNK)
        table = block_tables + request * table_width
        n, d = tl.arange(0, PADDED_OPEN), tl.arange(0, PADDED)
        position = new_base + n
        is_in = (position < end) & (n < OPEN) & ((position >= first) | (new_base > base))
        is_d = d < WIDTH
        if index < NUM_K:
            line, _ = _lines_of(index * GROUP, FIRST_LINE, GROUP, WIDTH, OPEN)
            rows = _rows_at(
                inputs + (NUM_K + index) * WIDTH, 2 * NUM_K * WIDTH, state, table, line, base, start, first, position,
                is_in, d, is_d, WORDS, PER_BLOCK, WIDTH,
            )  # fmt: skip
        else:
            head = index - NUM_K
            _, line = _lines_of(head, FIRST_LINE, GROUP, WIDTH, OPEN)
            line += WIDTH
            rows = _rows_at(
                updates + head * WIDTH, NUM_V * WIDTH, state, table, line, base, start, first, position,
                is_in, d, is_d, WORDS, PER_BLOCK, WIDTH,
            )  # fmt: skip
            decays = _decays_at(
                factors, head, state, table, line + OPEN, base, start, first, position, is_in,
                NUM_V, WORDS, PER_BLOCK, WIDTH,
            )  # fmt: skip
            tl.debug_barrier()  # all threads have read what is overwritten
            of_decays = line_at(state, table, line + OPEN + tl.where(is_in, n // WIDTH, 0), WORDS, PER_BLOCK, WIDTH)
            tl.store(of_decays + n % WIDTH, decays, mask=is_in)
            if head == 0:
                one = tl.zeros([1], tl.int32)
                of_count = line_at(state, table, line + OPEN + OPEN // WIDTH + one, WORDS, PER_BLOCK, WIDTH)
                tl.store(of_count + OPEN % WIDTH, (new_base // CHUNK + one).to(tl.float32))
        tl.debug_barrier()
        to = line_at(state, table, line + tl.where(is_in, n, 0), WORDS, PER_BLOCK, WIDTH)
        tl.store(to[:, None] + d[None, :], rows, mask=is_in[:, None] & is_d[None, :])
