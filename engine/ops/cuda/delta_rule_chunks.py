"""The kernels of the gated delta rule (delta_rule.py) for prompts, drafts, and all steps of BATCH_INVARIANT=1.

The updates of a chunk are `U = M (V - exp(G) K S)` with `M = (I + A)^-1 diag(beta)` and `A[t, i] = beta_t exp(G_t -
G_i) (k_t k_i)` for i < t, and its outputs are `exp(G) Q S + P U` with `P[t, i] = exp(G_t - G_i) (q_t k_i)` for i <= t
(Yang et al., 2024). `prepare_chunks` computes M, P and G of all chunks, which do not depend on the state S. `advance`
computes the chunks of a value head one after another with a slice of the state in registers. A row of a product
depends on no later row, and each chunk begins at a multiple of CHUNK, so results do not depend on the steps that
computed them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.delta_rule_kernels import CHUNK, KEPT, PRECISION, factors_at, lines_of, new_base, rows_at, state_at
from engine.ops.cuda.launch import begin_next, kernel, wait_for_inputs
from engine.ops.cuda.states import line_at


@triton.jit
def _first_tile(query_starts, request, SPARE: tl.constexpr):
    """Return the index of the first chunk of a request in `products`."""
    return tl.load(query_starts + request) // CHUNK + SPARE * request


@kernel
def prepare_chunks(
    qkv, inputs, factors, bases, state, query_starts, context_lens, block_tables, products, num_requests,
    table_width, FIRST_LINE: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, OPEN: tl.constexpr,
    SPARE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute M, P and G of one chunk for the value heads of one key head."""
    begin_next()
    wait_for_inputs()
    tile, key_head = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = NUM_V // NUM_K
    request, high = 0, num_requests
    while high - request > 1:
        middle = (request + high) // 2
        if _first_tile(query_starts, middle, SPARE) <= tile:
            request = middle
        else:
            high = middle
    start = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - start
    first = tl.load(context_lens + request)
    base = tl.load(bases + request)
    begin, end = base + (tile - _first_tile(query_starts, request, SPARE)) * CHUNK, first + count
    if (count > 0) & (begin < end):
        table = block_tables + request * table_width
        n = tl.arange(0, CHUNK)
        position = begin + n
        is_in = position < end
        row = (start + position - first).to(tl.int64)
        key_line, _ = lines_of(key_head * GROUP, FIRST_LINE, GROUP, WIDTH, OPEN)
        k_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        q_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        for depth in range(0, PADDED, DEPTH):
            d = depth + tl.arange(0, DEPTH)
            k = rows_at(
                inputs + (NUM_K + key_head) * WIDTH, 2 * NUM_K * WIDTH, state, table, key_line, base, start, first,
                position, is_in, d, d < WIDTH, WORDS, PER_BLOCK, WIDTH,
            )  # fmt: skip
            is_query = (is_in & (position >= first))[:, None] & (d < WIDTH)[None, :]
            at = row[:, None] * 2 * NUM_K * WIDTH + key_head * WIDTH + d[None, :]
            q = tl.load(inputs + at, mask=is_query, other=0)
            k_scores = tl.dot(k, tl.trans(k), k_scores, input_precision=PRECISION)
            q_scores = tl.dot(q, tl.trans(k), q_scores, input_precision=PRECISION)
        for head in range(key_head * GROUP, key_head * GROUP + GROUP):
            _, line = lines_of(head, FIRST_LINE, GROUP, WIDTH, OPEN)
            line += WIDTH + OPEN
            g = factors_at(
                factors, head, 0, state, table, line, base, start, first, position, is_in,
                NUM_V, WORDS, PER_BLOCK, WIDTH,
            )  # fmt: skip
            beta = factors_at(
                factors, head + NUM_V, KEPT, state, table, line, base, start, first, position, is_in,
                NUM_V, WORDS, PER_BLOCK, WIDTH,
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
            to = products + (tile * NUM_V + head).to(tl.int64) * (2 * CHUNK + 1) * CHUNK
            at = n[:, None] * CHUNK + n[None, :]
            tl.store(to + at, m * beta[None, :])
            tl.store(to + CHUNK * CHUNK + at, p)
            tl.store(to + 2 * CHUNK * CHUNK + n, total)


@triton.jit
def _advance_chunk(q, k, v, products, s):
    """Return the outputs and updates of a chunk and the state behind it."""
    n = tl.arange(0, CHUNK)
    at = n[:, None] * CHUNK + n[None, :]
    m, p = tl.load(products + at), tl.load(products + CHUNK * CHUNK + at)
    total = tl.load(products + 2 * CHUNK * CHUNK + n)
    whole = tl.load(products + 2 * CHUNK * CHUNK + CHUNK - 1)
    kept, fade = tl.exp(total), tl.exp(whole - total)
    k_read = tl.dot(k, s, input_precision=PRECISION)
    q_read = tl.dot(q, s, input_precision=PRECISION)
    u = tl.dot(m, v - k_read * kept[:, None], input_precision=PRECISION)
    out = tl.dot(p, u, q_read * kept[:, None], input_precision=PRECISION)
    s = tl.dot(tl.trans(k), u * fade[:, None], s * tl.exp(whole), input_precision=PRECISION)
    return out, u, s


@kernel
def advance(
    qkv, inputs, factors, bases, state, query_starts, context_lens, block_tables, products, out,
    table_width, FIRST_LINE: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, OPEN: tl.constexpr, SPARE: tl.constexpr,
    MAX_REJECTED: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS columns of a value head for all tokens of a request. Store the state at the last multiple of
    CHUNK that no later step computes again, and the updates behind it.
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
        closed = new_base(base, first, end, MAX_REJECTED)
        table = block_tables + request * table_width
        key_line, line = lines_of(head, FIRST_LINE, GROUP, WIDTH, OPEN)
        n, d, e = tl.arange(0, CHUNK), tl.arange(0, PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        is_d, is_e = d < WIDTH, e < WIDTH
        is_state = is_d[:, None] & is_e[None, :]
        queries, keys = inputs + head // GROUP * WIDTH, inputs + (NUM_K + head // GROUP) * WIDTH
        values, out = qkv + (2 * NUM_K + head) * WIDTH, out + head * WIDTH
        products += (_first_tile(query_starts, request, SPARE) * NUM_V + head).to(tl.int64) * (2 * CHUNK + 1) * CHUNK
        s, at_state = state_at(state, table, line, d, e, is_state, base, WORDS, PER_BLOCK, WIDTH)
        # First the chunks that earlier steps have begun, then whole chunks of this step up to the state that is
        # stored, then the chunks behind it.
        begun = tl.minimum(tl.cdiv(first, CHUNK) * CHUNK, end)
        for part in range(2):
            low = tl.where(part == 0, base, tl.maximum(begun, closed))
            for begin in range(low, tl.where(part == 0, begun, end), CHUNK):
                if (begin == closed) & (closed > base):
                    tl.store(at_state, s, mask=is_state)
                position = begin + n
                is_in = position < end
                is_own = is_in & (position >= first)
                row = (start + position - first).to(tl.int64)[:, None]
                k = rows_at(
                    keys, 2 * NUM_K * WIDTH, state, table, key_line, base, start, first, position, is_in,
                    d, is_d, WORDS, PER_BLOCK, WIDTH,
                )  # fmt: skip
                q = tl.load(
                    queries + row * 2 * NUM_K * WIDTH + d[None, :], mask=is_own[:, None] & is_d[None, :], other=0
                )
                v = rows_at(
                    values, (2 * NUM_K + NUM_V) * WIDTH, state, table, line + WIDTH + KEPT, base, start, first,
                    position, is_in, e, is_e, WORDS, PER_BLOCK, WIDTH,
                )  # fmt: skip
                at = products + (begin - base).to(tl.int64) * NUM_V * (2 * CHUNK + 1)
                y, u, s = _advance_chunk(q, k, v, at, s)
                tl.store(out + row * NUM_V * WIDTH + e[None, :], y, mask=is_own[:, None] & is_e[None, :])
                if begin >= closed:
                    of_update = tl.where(is_in, line + WIDTH + position - closed, 0)
                    to = line_at(state, table, of_update, WORDS, PER_BLOCK, WIDTH)[:, None] + e[None, :]
                    tl.store(to, u, mask=is_in[:, None] & is_e[None, :])
            for begin in tl.range(begun, tl.where(part == 0, closed, begun), CHUNK, num_stages=STAGES):
                row = (start + begin - first + n).to(tl.int64)[:, None]
                k = tl.load(keys + row * 2 * NUM_K * WIDTH + d[None, :], mask=is_d[None, :], other=0)
                q = tl.load(queries + row * 2 * NUM_K * WIDTH + d[None, :], mask=is_d[None, :], other=0)
                v = tl.load(values + row * (2 * NUM_K + NUM_V) * WIDTH + e[None, :], mask=is_e[None, :], other=0)
                at = products + (begin - base).to(tl.int64) * NUM_V * (2 * CHUNK + 1)
                y, _, s = _advance_chunk(q, k, v.to(tl.float32), at, s)
                tl.store(out + row * NUM_V * WIDTH + e[None, :], y, mask=is_e[None, :])
        if (closed == end) & (closed > base):
            tl.store(at_state, s, mask=is_state)
