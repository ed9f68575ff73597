"""Work before attention in one kernel: norms of heads, rotation, and the write to the paged cache. If each request has
one token, the attention kernel does it with the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from engine.dtypes import scale_bytes
from engine.ops.cuda.int8_cache import put
from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, next_power_of_2, wait_for_inputs

HEADS = 8  # that a program writes


@dataclass(frozen=True)
class HeadNorm:
    """Norms of query and key heads that `head_norm_paged_attention` has yet to apply."""

    qkv: Tensor
    q_weight: Tensor
    k_weight: Tensor
    epsilon: float


def rotate_heads(qkv: Tensor, cos_sin: Tensor, *, num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Return `qkv` with its query and key heads rotated."""
    y = qkv.new_empty(qkv.shape)
    if len(qkv):
        grid = len(qkv), cdiv(num_heads + 2 * num_kv_heads, HEADS)
        _rotate[grid](
            qkv, cos_sin, y, num_heads, num_kv_heads, head_dim, next_power_of_2(head_dim), cos_sin.shape[1],
            HEADS, **PDL,
        )  # fmt: skip
    return y


def rotate_and_cache(
    qkv: Tensor | HeadNorm,
    cos_sin: Tensor,
    kv_cache: Tensor,
    where: tuple[Tensor, ...],
    num_heads: int,
    pairs: Tensor | None = None,
) -> Tensor:
    """Write rotated keys, and values, to the cache, and to `pairs` [2, Hkv, T, D] if given. Return the rotated queries
    [T, Hq D].
    """
    heads, norm, has_norm = without_norm(qkv)
    num_kv_heads, (block_size, head_dim) = kv_cache.shape[2], sizes_of(kv_cache)
    query = heads.new_empty(len(heads), num_heads * head_dim)
    grid = len(heads), cdiv(num_heads + 2 * num_kv_heads, HEADS)
    _rotate_and_cache[grid](
        heads, cos_sin, kv_cache, *where, query, query if pairs is None else pairs, *norm,
        len(where[1]), where[2].shape[1],
        has_norm, pairs is not None, len(heads) == len(where[1]), num_heads, num_kv_heads, head_dim,
        next_power_of_2(head_dim), cos_sin.shape[1], block_size, HEADS, **PDL,
    )  # fmt: skip
    return query


def without_norm(qkv: Tensor | HeadNorm) -> tuple[Tensor, tuple[Tensor, Tensor, float], bool]:
    """Return all heads, the arguments of `normed_and_rotated` for their norms (weights and epsilon), and whether there
    are norms.
    """
    if isinstance(qkv, HeadNorm):
        return qkv.qkv, (qkv.q_weight, qkv.k_weight, qkv.epsilon), True
    return qkv, (qkv, qkv, 0.0), False


def sizes_of(kv_cache: Tensor) -> tuple[int, int]:
    """Return the number of tokens of a block and of elements of a key."""
    block_size, stored = kv_cache.shape[3:]
    return block_size, stored - scale_bytes(str(kv_cache.dtype).removeprefix("torch."))


@triton.jit
def request_of(query_starts, num_requests, index, TOKENS: tl.constexpr):
    """Return the last request b with query_starts[b] // TOKENS + b <= index, which owns the tile of TOKENS tokens with
    this index if each request has one spare tile. With TOKENS = 0, return the request of the token.
    """
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(query_starts + middle)
        if TOKENS > 0:
            start = start // TOKENS + middle
        if start <= index:
            low = middle
        else:
            high = middle
    return low


@kernel
def _rotate(
    qkv, cos_sin, y, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of one token."""
    begin_next()
    wait_for_inputs()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < NUM_HEADS + 2 * NUM_KV_HEADS
    x = normed_and_rotated(
        qkv, cos_sin, qkv, qkv, 0.0, token, head, is_head,
        False, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, ROTARY_DIM,
    )  # fmt: skip
    d = tl.arange(0, PADDED_DIM)
    to = y + token * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM + head[:, None] * HEAD_DIM + d[None, :]
    tl.store(to, x, mask=is_head[:, None] & (d < HEAD_DIM)[None, :])


@kernel
def _rotate_and_cache(
    qkv, cos_sin, cache, query_starts, context_lens, block_tables, query, pairs, q_weight, k_weight, epsilon,
    num_requests, table_width,
    HAS_NORM: tl.constexpr, HAS_PAIRS: tl.constexpr, ONE_EACH: tl.constexpr, NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Process HEADS of the Hq + 2 Hkv heads of one token."""
    begin_next()
    wait_for_inputs()
    token = tl.program_id(0)
    if ONE_EACH:
        request = token
    else:
        request = request_of(query_starts, num_requests, token, 0)
    position = tl.load(context_lens + request) + token - tl.load(query_starts + request)
    block = tl.load(block_tables + request * table_width + position // BLOCK_SIZE).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < NUM_HEADS + 2 * NUM_KV_HEADS
    x = normed_and_rotated(
        qkv, cos_sin, q_weight, k_weight, epsilon, token.to(tl.int64), head, is_head,
        HAS_NORM, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, ROTARY_DIM,
    )  # fmt: skip
    d = tl.arange(0, PADDED_DIM)
    is_in = is_head[:, None] & (d < HEAD_DIM)[None, :]
    to_query = query + token.to(tl.int64) * NUM_HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + d[None, :]
    tl.store(to_query, x, mask=is_in & (head < NUM_HEADS)[:, None])
    is_in = is_in & (head >= NUM_HEADS)[:, None]
    if HAS_PAIRS:
        own = (head - NUM_HEADS).to(tl.int64) * tl.num_programs(0) + token
        tl.store(pairs + own[:, None] * HEAD_DIM + d[None, :], x, mask=is_in)
    write(cache, block, position, head - NUM_HEADS, x, is_in, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)


@triton.jit
def rotated_queries(
    qkv, cos_sin, q_weight, k_weight, epsilon, cache, table, token, position, is_row, is_last,
    HAS_NORM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the rotated queries of a token for the key/value head program_id(1), [ROWS, D]. With `is_last`, this
    program also reads the token's own key and value, so it writes them to the cache first. `table` holds the blocks of
    the request.
    """
    heads: tl.constexpr = NUM_KV_HEADS * GROUP
    kv_head = tl.program_id(1)
    q = normed_and_rotated(
        qkv, cos_sin, q_weight, k_weight, epsilon, token, kv_head * GROUP + tl.arange(0, ROWS), is_row,
        HAS_NORM, heads, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, ROTARY_DIM,
    )  # fmt: skip
    if is_last:
        own, both = kv_head + tl.arange(0, 2) * NUM_KV_HEADS, tl.arange(0, 2) < 2
        pair = normed_and_rotated(
            qkv, cos_sin, q_weight, k_weight, epsilon, token, heads + own, both,
            HAS_NORM, heads, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, ROTARY_DIM,
        )  # fmt: skip
        block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        is_in = both[:, None] & (tl.arange(0, PADDED_DIM) < HEAD_DIM)[None, :]
        write(cache, block, position, own, pair, is_in, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    tl.debug_barrier()  # what one thread has written others read
    return q.to(qkv.dtype.element_ty)


@triton.jit
def normed_and_rotated(
    qkv, cos_sin, q_weight, k_weight, epsilon, token, head, is_head,
    HAS_NORM: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
):  # fmt: skip
    """Return queries, keys and values of a token, f32 [heads, D]. Queries and keys are normalized, if there are norms,
    and rotated.
    """
    d = tl.arange(0, PADDED_DIM)
    is_in = is_head[:, None] & (d < HEAD_DIM)[None, :]
    base = qkv + token * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    x = tl.load(base + head[:, None] * HEAD_DIM + d[None, :], mask=is_in, other=0).to(tl.float32)
    # By halves: element d < R/2 is turned with d + R/2, and back.
    half: tl.constexpr = ROTARY_DIM // 2
    is_rotated = (head < NUM_HEADS + NUM_KV_HEADS)[:, None] & (d < ROTARY_DIM)[None, :]
    other = tl.where(d < half, d + half, d - half)
    y = tl.load(base + head[:, None] * HEAD_DIM + other[None, :], mask=is_in & is_rotated, other=0).to(tl.float32)
    if HAS_NORM:
        is_query = (head < NUM_HEADS)[:, None]
        is_normed = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
        scale = 1 / tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + epsilon)[:, None]
        own = tl.where(is_query, _row(q_weight, d, HEAD_DIM), _row(k_weight, d, HEAD_DIM))
        others = tl.where(is_query, _row(q_weight, other, HEAD_DIM), _row(k_weight, other, HEAD_DIM))
        x = tl.where(is_normed, x * scale * own, x)
        y = y * scale * others
    angles = cos_sin + token * ROTARY_DIM + d % half
    cos = tl.load(angles, mask=d < ROTARY_DIM, other=1)[None, :]
    sin = tl.load(angles + half, mask=d < ROTARY_DIM, other=0)[None, :]
    return tl.where(is_rotated, x * cos + tl.where(d < half, -1.0, 1.0)[None, :] * y * sin, x)


@triton.jit
def write(
    cache, block, position, head, x, is_in,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Write heads of keys, then of values, [heads, D], of one position to its block of the cache, which has the same
    order.
    """
    row = head * BLOCK_SIZE + position % BLOCK_SIZE
    if cache.dtype.element_ty == tl.int8:
        put(cache, block, row, x, is_in, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    else:
        rows = cache + (block * 2 * NUM_KV_HEADS * BLOCK_SIZE + row)[:, None] * HEAD_DIM
        tl.store(rows + tl.arange(0, x.shape[1])[None, :], x, mask=is_in)


@triton.jit
def _row(weight, d, HEAD_DIM: tl.constexpr):
    return tl.load(weight + d, mask=(d >= 0) & (d < HEAD_DIM), other=0)[None, :]
