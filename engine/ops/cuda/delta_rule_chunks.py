"""The kernels of the gated delta rule (delta_rule.py) for prompts, drafts, and all steps of BATCH_INVARIANT=1.

The updates of a chunk are `U = M (V - exp(G) K S)` with `M = (I + A)^-1 diag(beta)` and `A[t, i] = beta_t exp(G_t -
G_i) (k_t k_i)` for i < t, and its outputs are `exp(G) Q S + P U` with `P[t, i] = exp(G_t - G_i) (q_t k_i)` for i <= t
(Yang et al., 2024). `prepare_chunks` computes M, P and factors of the rows of K and Q, which normalize them and contain
exp(G), for all chunks at once, because they do not depend on the state S. `scan_chunks` computes the chunks of a value
head one after another. A program is one warp with COLUMNS columns of the state in its registers, transposed, so that
what one product of the tensor cores computes is an input of the next one in the same registers and no warp waits for
another one. A row of a product depends on no later row, and each chunk begins at a multiple of CHUNK, so results do not
depend on the steps that computed them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.bf16_parts import dot_of_parts
from engine.ops.cuda.delta_rule_kernels import (
    CHUNK,
    EPSILON,
    KEPT,
    PRECISION,
    factors_at,
    lines_of,
    new_base,
    rows_at,
    span_of,
    state_at,
)
from engine.ops.cuda.launch import begin_next, kernel, wait_for_inputs
from engine.ops.cuda.recurrent_states import line_at

COLUMNS = tl.constexpr(16)  # of a value head, for a program of `scan_chunks`, which is one warp
PRODUCTS = tl.constexpr((2 * CHUNK.value + 4) * CHUNK.value)  # numbers that `prepare_chunks` stores


@triton.jit
def _first_tile(query_starts, request, SPARE: tl.constexpr):
    """Return the index of the first chunk of a request in `products`."""
    return tl.load(query_starts + request) // CHUNK + SPARE * request


@kernel
def prepare_chunks(
    qkv, factors, bases, state, query_starts, context_lens, block_tables, products, num_requests,
    table_width, FIRST_LINE: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, OPEN: tl.constexpr,
    SPARE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute M, P and G of one chunk for the value heads of one key head."""
    begin_next()
    wait_for_inputs()
    tile, key_head = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = NUM_V // NUM_K
    ROW: tl.constexpr = (2 * NUM_K + NUM_V) * WIDTH
    request, high = 0, num_requests
    while high - request > 1:
        middle = (request + high) // 2
        if _first_tile(query_starts, middle, SPARE) <= tile:
            request = middle
        else:
            high = middle
    start, first, end, base = span_of(query_starts, context_lens, bases, request)
    begin = base + (tile - _first_tile(query_starts, request, SPARE)) * CHUNK
    if (first < end) & (begin < end):
        table = block_tables + request * table_width
        n = tl.arange(0, CHUNK)
        position = begin + n
        is_in = position < end
        row = (start + position - first).to(tl.int64)
        key_line, _ = lines_of(key_head * GROUP, FIRST_LINE, GROUP, WIDTH, OPEN)
        k_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        q_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        k_squares = tl.zeros([CHUNK], tl.float32)
        q_squares = tl.zeros([CHUNK], tl.float32)
        for depth in range(0, PADDED, DEPTH):
            d = depth + tl.arange(0, DEPTH)
            k = rows_at(
                qkv + (NUM_K + key_head) * WIDTH, ROW, state, table, key_line, start, first,
                position, is_in, d, d < WIDTH, WORDS, PER_BLOCK, WIDTH,
            )  # fmt: skip
            is_query = (is_in & (position >= first))[:, None] & (d < WIDTH)[None, :]
            q = tl.load(qkv + row[:, None] * ROW + key_head * WIDTH + d[None, :], mask=is_query, other=0)
            k_squares += tl.sum(k * k, 1)
            q_squares += tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)
            k = k.to(q.dtype)
            k_scores = tl.dot(k, tl.trans(k), k_scores, input_precision=PRECISION)
            q_scores = tl.dot(q, tl.trans(k), q_scores, input_precision=PRECISION)
        k_scale, q_scale = 1 / tl.sqrt(k_squares + EPSILON), WIDTH**-0.5 / tl.sqrt(q_squares + EPSILON)
        k_scores *= k_scale[:, None] * k_scale[None, :]
        q_scores *= q_scale[:, None] * k_scale[None, :]
        for head in range(key_head * GROUP, key_head * GROUP + GROUP):
            _, line = lines_of(head, FIRST_LINE, GROUP, WIDTH, OPEN)
            g = factors_at(
                factors, head, 0, state, table, line, start, first, position, is_in,
                NUM_V, WORDS, PER_BLOCK, WIDTH, OPEN,
            )  # fmt: skip
            beta = factors_at(
                factors, head + NUM_V, KEPT, state, table, line, start, first, position, is_in,
                NUM_V, WORDS, PER_BLOCK, WIDTH, OPEN,
            )  # fmt: skip
            total = tl.cumsum(g, 0)
            decay = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
            a = tl.where(n[:, None] > n[None, :], beta[:, None] * k_scores * decay, 0.0)
            p = tl.where(n[:, None] >= n[None, :], q_scores * decay, 0.0)
            # The inverse of I + A, row by row: row j is that of I less the earlier rows times row j of A.
            by_column, m = tl.trans(a), tl.where(n[:, None] == n[None, :], 1.0, 0.0)
            for j in range(1, CHUNK):
                a_j = tl.sum(tl.where((n == j)[None, :], by_column, 0.0), 1)
                m_j = tl.sum(a_j[:, None] * m, 0)
                m = tl.where((n == j)[:, None], m - m_j[None, :], m)
            whole = tl.sum(tl.where(n == CHUNK - 1, total, 0.0), 0)
            to = products + (tile * NUM_V + head).to(tl.int64) * PRODUCTS
            at = n[:, None] * CHUNK + n[None, :]
            tl.store(to + at, m * beta[None, :])
            tl.store(to + CHUNK * CHUNK + at, p)
            to += 2 * CHUNK * CHUNK + n
            tl.store(to, tl.exp(total) * k_scale)
            tl.store(to + CHUNK, tl.exp(total) * q_scale)
            tl.store(to + 2 * CHUNK, tl.exp(whole - total) * k_scale)
            tl.store(to + 3 * CHUNK, tl.exp(whole + tl.zeros([CHUNK], tl.float32)))


@triton.jit
def _chunk_step(q, k, v, products, s, IS_FLOAT32: tl.constexpr):
    """Return the outputs and updates of a chunk and the state behind it, all with a row for each column of values."""
    n = tl.arange(0, CHUNK)
    at = n[:, None] * CHUNK + n[None, :]
    m, p = tl.load(products + at), tl.load(products + CHUNK * CHUNK + at)
    products += 2 * CHUNK * CHUNK
    of_keys, of_queries = tl.load(products + n), tl.load(products + CHUNK + n)
    fade, whole = tl.load(products + 2 * CHUNK + n), tl.load(products + 3 * CHUNK)
    zeros = tl.zeros([COLUMNS, CHUNK], tl.float32)
    k_read = dot_of_parts(s, tl.trans(k), zeros, IS_FLOAT32)
    q_read = dot_of_parts(s, tl.trans(q), zeros, IS_FLOAT32)
    u = dot_of_parts(tl.trans(v) - k_read * of_keys[None, :], tl.trans(m), zeros, IS_FLOAT32)
    out = dot_of_parts(u, tl.trans(p), q_read * of_queries[None, :], IS_FLOAT32)
    s = dot_of_parts(u * fade[None, :], k, s * whole, IS_FLOAT32)
    return tl.trans(out), tl.trans(u), s


@kernel
def scan_chunks(
    qkv, bases, state, query_starts, context_lens, block_tables, products, out,
    table_width, FIRST_LINE: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, OPEN: tl.constexpr, SPARE: tl.constexpr,
    MAX_REJECTED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS columns of a value head for all tokens of a request. Store the state at the last multiple of
    CHUNK that no later step computes again, and the updates behind it.
    """
    begin_next()
    wait_for_inputs()
    request, head = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = NUM_V // NUM_K
    ROW: tl.constexpr = (2 * NUM_K + NUM_V) * WIDTH
    IS_FLOAT32: tl.constexpr = qkv.dtype.element_ty == tl.float32
    start, first, end, base = span_of(query_starts, context_lens, bases, request)
    if first < end:
        closed = new_base(base, first, end, MAX_REJECTED)
        table = block_tables + request * table_width
        key_line, line = lines_of(head, FIRST_LINE, GROUP, WIDTH, OPEN)
        n, d, e = tl.arange(0, CHUNK), tl.arange(0, PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        is_d, is_e = d < WIDTH, e < WIDTH
        is_state = is_d[:, None] & is_e[None, :]
        queries, keys = qkv + head // GROUP * WIDTH, qkv + (NUM_K + head // GROUP) * WIDTH
        values, out = qkv + (2 * NUM_K + head) * WIDTH, out + head * WIDTH
        products += (_first_tile(query_starts, request, SPARE) * NUM_V + head).to(tl.int64) * PRODUCTS
        at_state = state_at(state, table, line, d, e, WORDS, PER_BLOCK, WIDTH)
        s = tl.trans(tl.load(at_state, mask=is_state & (base > 0), other=0))
        # First the chunks that earlier steps have begun, then whole chunks of this step up to the state that is
        # stored, then the chunks behind it.
        begun = tl.minimum(tl.cdiv(first, CHUNK) * CHUNK, end)
        for part in range(2):
            low = tl.where(part == 0, base, tl.maximum(begun, closed))
            for begin in range(low, tl.where(part == 0, begun, end), CHUNK):
                if (begin == closed) & (closed > base):
                    at_state = state_at(state, table, line, d, e, WORDS, PER_BLOCK, WIDTH)
                    tl.store(at_state, tl.trans(s), mask=is_state)
                position = begin + n
                is_in = position < end
                is_own = is_in & (position >= first)
                row = (start + position - first).to(tl.int64)[:, None]
                k = rows_at(
                    keys, ROW, state, table, key_line, start, first, position, is_in,
                    d, is_d, WORDS, PER_BLOCK, WIDTH,
                )  # fmt: skip
                q = tl.load(queries + row * ROW + d[None, :], mask=is_own[:, None] & is_d[None, :], other=0)
                v = rows_at(
                    values, ROW, state, table, line + WIDTH + KEPT, start, first, position, is_in,
                    e, is_e, WORDS, PER_BLOCK, WIDTH,
                )  # fmt: skip
                at = products + ((begin - base) // CHUNK).to(tl.int64) * NUM_V * PRODUCTS
                y, u, s = _chunk_step(q, k.to(q.dtype), v, at, s, IS_FLOAT32)
                tl.store(out + row * NUM_V * WIDTH + e[None, :], y, mask=is_own[:, None] & is_e[None, :])
                if begin >= closed:
                    of_update = line + WIDTH + position % KEPT
                    to = line_at(state, table, of_update, WORDS, PER_BLOCK, WIDTH)[:, None] + e[None, :]
                    tl.store(to, u, mask=is_in[:, None] & is_e[None, :])
            for begin in tl.range(begun, tl.where(part == 0, closed, begun), CHUNK, num_stages=STAGES):
                row = (start + begin - first + n).to(tl.int64)[:, None]
                k = tl.load(keys + row * ROW + d[None, :], mask=is_d[None, :], other=0)
                q = tl.load(queries + row * ROW + d[None, :], mask=is_d[None, :], other=0)
                v = tl.load(values + row * ROW + e[None, :], mask=is_e[None, :], other=0)
                at = products + ((begin - base) // CHUNK).to(tl.int64) * NUM_V * PRODUCTS
                y, _, s = _chunk_step(q, k, v.to(tl.float32), at, s, IS_FLOAT32)
                tl.store(out + row * NUM_V * WIDTH + e[None, :], y, mask=is_e[None, :])
        if (closed == end) & (closed > base):
            at_state = state_at(state, table, line, d, e, WORDS, PER_BLOCK, WIDTH)
            tl.store(at_state, tl.trans(s), mask=is_state)
