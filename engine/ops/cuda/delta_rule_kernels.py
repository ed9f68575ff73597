"""The kernels of the gated delta rule (delta_rule.py) that compute the gates of a step and store its open positions,
and functions for addresses.

Positions that earlier steps computed are in the lines of the state, from the position `base` on, at whose beginning the
stored state is: their keys, updates, values, decays and betas, those of position p in slot p % KEPT. Positions of this
step are in `qkv` (queries, keys and values) and `factors` (decays, then betas), one row each. Keys are not normalized.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.launch import begin_next, kernel, wait_for_inputs
from engine.ops.cuda.recurrent_states import line_at
from engine.ops.cuda.rotate_and_cache import request_of

PRECISION = tl.constexpr("tf32x3")  # of the matrix products: that of float32
CHUNK = tl.constexpr(16)  # positions between two states
EPSILON = tl.constexpr(1e-6)  # added to sums of squares
KEPT = tl.constexpr(32)  # slots; lines of a value head for updates, then as many for values


@kernel
def compute_gates(
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
    decay = decay_of(gates + row * 2 * NUM_V + NUM_V + v, a_log + v, dt_bias + v, is_v)
    tl.store(factors + row * 2 * NUM_V + v, decay, mask=is_v)
    tl.store(factors + row * 2 * NUM_V + NUM_V + v, 1 / (1 + tl.exp(-gate)), mask=is_v)
    if ONE_EACH:
        request = token
    else:
        request = request_of(query_starts, num_requests, token, 0)
    if tl.load(query_starts + request) == token:
        first = tl.load(context_lens + request)
        table = block_tables + request * table_width
        _, line = lines_of(0, FIRST_LINE, 1, WIDTH, OPEN)
        tl.store(bases + request, base_of(state, table, line, first, WORDS, PER_BLOCK, WIDTH, OPEN))


@triton.jit
def base_of(
    state, table, line, first, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, OPEN: tl.constexpr
):  # fmt: skip
    """Return the position of the stored state of the value head whose lines begin at `line`, before the step."""
    count = tl.load(count_at(state, table, line, WORDS, PER_BLOCK, WIDTH, OPEN), mask=first > 0, other=0)
    base = tl.where(first > 0, count, 0.0).to(tl.int32) * CHUNK
    # A request that has ended may compute its last position again, which is not used.
    return tl.where((base > first) | (base + KEPT < first), first // CHUNK * CHUNK, base)


@triton.jit
def span_of(query_starts, context_lens, bases, request):
    """Return the first row of a request, the positions between which the step is, and that of the stored state."""
    start, first = tl.load(query_starts + request), tl.load(context_lens + request)
    return start, first, first + tl.load(query_starts + request + 1) - start, tl.load(bases + request)


@triton.jit
def decay_of(gate, a_log, dt_bias, mask=None):
    """Return the logarithms of the decays of value heads."""
    x = tl.load(gate, mask=mask).to(tl.float32) + tl.load(dt_bias, mask=mask)
    return -tl.exp(tl.load(a_log, mask=mask)) * _softplus(x)


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
def factor_at(
    state, table, line, index, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, OPEN: tl.constexpr
):  # fmt: skip
    """Return the addresses of the decays of a value head by slot, or of the betas, from index KEPT on."""
    return line_at(state, table, line + WIDTH + OPEN + index // WIDTH, WORDS, PER_BLOCK, WIDTH) + index % WIDTH


@triton.jit
def count_at(
    state, table, line, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, OPEN: tl.constexpr
):  # fmt: skip
    """Return the address of the number of closed chunks of a value head."""
    return factor_at(state, table, line, OPEN, WORDS, PER_BLOCK, WIDTH, OPEN)


@triton.jit
def rows_at(
    new, new_width, state, table, line, start, first, position, is_in, columns, is_column,
    WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return columns of keys or values at positions [N, columns]: of this step from `new`, of earlier ones from the
    lines from `line` on.
    """
    is_old = position < first
    at = line + tl.where(is_in & is_old, position % KEPT, 0)
    old = line_at(state, table, at, WORDS, PER_BLOCK, WIDTH)[:, None] + columns[None, :]
    rows = tl.load(old, mask=(is_in & is_old)[:, None] & is_column[None, :], other=0)
    own = new + (start + position - first).to(tl.int64)[:, None] * new_width + columns[None, :]
    return rows + tl.load(own, mask=(is_in & (position >= first))[:, None] & is_column[None, :], other=0).to(tl.float32)


@triton.jit
def factors_at(
    factors, head, kept, state, table, line, start, first, position, is_in,
    NUM_V: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """Return the decays at positions, as `rows_at`, or the betas with `head` + NUM_V and `kept` = KEPT."""
    is_old = is_in & (position < first)
    index = tl.where(is_old, position % KEPT + kept, 0)
    own = factors + (start + position - first).to(tl.int64) * 2 * NUM_V + head
    old = factor_at(state, table, line, index, WORDS, PER_BLOCK, WIDTH, OPEN)
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
def store_open_positions(
    qkv, factors, bases, state, query_starts, context_lens, block_tables,
    table_width, FIRST_LINE: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, OPEN: tl.constexpr, MAX_REJECTED: tl.constexpr,
):  # fmt: skip
    """Write the keys of a key head, or the values, decays and betas of a value head, of the positions of this step
    behind the stored state. `scan_chunks` has written their updates.
    """
    begin_next()
    wait_for_inputs()
    request, index = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = NUM_V // NUM_K
    start, first, end, base = span_of(query_starts, context_lens, bases, request)
    if first < end:
        closed = new_base(base, first, end, MAX_REJECTED)
        table = block_tables + request * table_width
        d, position = tl.arange(0, PADDED), closed + tl.arange(0, KEPT)
        is_in, slot = (position < end) & (position >= first), position % KEPT
        row = (start + position - first).to(tl.int64)
        if index < NUM_K:
            to, _ = lines_of(index * GROUP, FIRST_LINE, GROUP, WIDTH, OPEN)
            channels = (NUM_K + index) * WIDTH
        else:
            head = index - NUM_K
            channels = (2 * NUM_K + head) * WIDTH
            _, line = lines_of(head, FIRST_LINE, GROUP, WIDTH, OPEN)
            to = line + WIDTH + KEPT
            own = factors + row * 2 * NUM_V + head
            for_decays = factor_at(state, table, line, slot, WORDS, PER_BLOCK, WIDTH, OPEN)
            tl.store(for_decays, tl.load(own, mask=is_in), mask=is_in)
            for_betas = factor_at(state, table, line, KEPT + slot, WORDS, PER_BLOCK, WIDTH, OPEN)
            tl.store(for_betas, tl.load(own + NUM_V, mask=is_in), mask=is_in)
            tl.store(count_at(state, table, line, WORDS, PER_BLOCK, WIDTH, OPEN), (closed // CHUNK).to(tl.float32))
        is_row = is_in[:, None] & (d < WIDTH)[None, :]
        rows = tl.load(qkv + (row * (2 * NUM_K + NUM_V) * WIDTH + channels)[:, None] + d[None, :], mask=is_row)
        to = line_at(state, table, to + slot, WORDS, PER_BLOCK, WIDTH)
        tl.store(to[:, None] + d[None, :], rows.to(tl.float32), mask=is_row)
