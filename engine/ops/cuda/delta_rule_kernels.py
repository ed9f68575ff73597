"""The kernels of the gated delta rule (delta_rule.py) that prepare a step and keep its open positions, and addresses.

Positions that earlier steps computed are in the lines of the state, from the position `base` on, at whose beginning the
stored state is: their keys, updates, values, decays and betas. Positions of this step are in `qkv` (queries, keys and
values), `factors` (decays, then beta) and `updates`, one row each. Keys are not normalized.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.launch import begin_next, kernel, wait_for_inputs
from engine.ops.cuda.rotate_and_cache import request_of
from engine.ops.cuda.states import line_at

PRECISION = tl.constexpr("tf32x3")  # of the matrix products: that of float32
CHUNK = tl.constexpr(16)  # positions between two states
EPSILON = tl.constexpr(1e-6)  # added to sums of squares
KEPT = tl.constexpr(32)  # lines of a value head for updates, then as many for values


@kernel
def prepare(
    gates, a_log, dt_bias, state, query_starts, context_lens, block_tables, factors, bases, num_requests,
    table_width, FIRST_LINE: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr,
    PER_BLOCK: tl.constexpr, OPEN: tl.constexpr, ONE_EACH: tl.constexpr, PADDED_V: tl.constexpr,
):  # fmt: skip
    """Compute the decays and betas of one token. The program of a request's first token also finds the position of the
    stored state.
    """
    begin_next()
    wait_for_inputs()
    token = tl.program_id(0)
    row, v = token.to(tl.int64), tl.arange(0, PADDED_V)
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
def scales_of(x):
    """Return the factors that give the rows of `x` the length 1."""
    return 1 / tl.sqrt(tl.sum(x * x, 1) + EPSILON)


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
def state_at(state, table, line, d, e, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Return the addresses of rows `d` and columns `e` of the stored state."""
    return line_at(state, table, line + tl.minimum(d, WIDTH - 1), WORDS, PER_BLOCK, WIDTH)[:, None] + e[None, :]


@kernel
def keep(
    qkv, factors, bases, state, query_starts, context_lens, block_tables, updates,
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
    ROW: tl.constexpr = (2 * NUM_K + NUM_V) * WIDTH
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
                qkv + (NUM_K + index) * WIDTH, ROW, state, table, line, base, start, first, position,
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
                qkv + (2 * NUM_K + head) * WIDTH, ROW, state, table, line + KEPT, base, start, first, position,
                is_in, d, is_d, WORDS, PER_BLOCK, WIDTH,
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
