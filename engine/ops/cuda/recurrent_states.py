"""Addresses of the lines of a state (engine/ops/catalogue_states.py) in the blocks of a request, and the convolution
over positions, whose last inputs are such lines.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.catalogue_states import HISTORY
from engine.ops.cuda.attention import tile_of_queries
from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, wait_for_inputs
from engine.ops.cuda.prefill_attention import KnownStarts

TOKENS, CHANNELS = 16, 128  # of a program; TOKENS is the number of inputs that are kept, so it is HISTORY
assert TOKENS == HISTORY


def words_of(state: Tensor) -> Tensor:
    """Return the cache as float32 [num_blocks, words], whatever its type is."""
    return state.flatten(1).view(torch.float32)


def starts_of(query_starts: Tensor | KnownStarts) -> Tensor:
    return query_starts.starts if isinstance(query_starts, KnownStarts) else query_starts


def causal_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    query_starts: Tensor | KnownStarts,
    context_lens: Tensor,
    state_tables: Tensor,
    *,
    head_dim: int,
) -> tuple[Tensor, Tensor]:
    """Convolve x [T, C] over the positions of each request with weight [C, 1, K]. Return [T, C], and the state, which
    is updated in place.
    """
    (num_tokens, channels), num_requests, words = x.shape, len(context_lens), words_of(state)
    y, one_each = torch.empty_like(x), num_tokens == num_requests
    tokens = 1 if one_each else TOKENS
    tiles = num_tokens if one_each else num_tokens // tokens + num_requests
    if num_tokens:
        _convolve[(tiles, cdiv(channels, CHANNELS))](
            x, weight, words, starts_of(query_starts), context_lens, state_tables, y, num_requests,
            state_tables.shape[1], channels, weight.shape[2], head_dim, words.shape[1], words.shape[1] // head_dim,
            HISTORY, tokens, one_each, CHANNELS, num_warps=4, **PDL,
        )  # fmt: skip
    return y, state


@triton.jit
def line_at(state, table, line, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Return the addresses of lines of a request, whose blocks `table` holds."""
    block = tl.load(table + line // PER_BLOCK).to(tl.int64)
    return state + block * WORDS + line % PER_BLOCK * WIDTH


@kernel
def _convolve(
    x, weight, state, query_starts, context_lens, block_tables, y, num_requests, table_width,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr,
    HISTORY: tl.constexpr, TOKENS: tl.constexpr, ONE_EACH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute TILE channels of TOKENS tokens of one request. The program of its first tokens, which alone reads the
    inputs that were kept, then keeps the last ones.
    """
    begin_next()
    wait_for_inputs()
    request, start, count, begin = tile_of_queries(query_starts, num_requests, TOKENS, ONE_EACH)
    if begin < count:
        first = tl.load(context_lens + request)
        table = block_tables + request * table_width
        c = tl.program_id(1) * TILE + tl.arange(0, TILE)
        is_channel = c < CHANNELS
        line = tl.minimum(c, CHANNELS - 1) // WIDTH * HISTORY
        token = begin + tl.arange(0, TOKENS)
        rows = x + (start + token).to(tl.int64)[:, None] * CHANNELS + c[None, :]
        is_in = (token < count)[:, None] & is_channel[None, :]
        total = tl.zeros([TOKENS, TILE], tl.float32)
        for k in tl.static_range(TAPS):
            back = TAPS - 1 - k
            taps = tl.load(weight + c * TAPS + k, mask=is_channel, other=0).to(tl.float32)
            inputs = tl.load(rows - back * CHANNELS, mask=is_in & (token >= back)[:, None], other=0).to(tl.float32)
            if begin == 0:
                position = first + token - back
                is_kept = is_in & ((token < back) & (position >= 0))[:, None]
                at = line[None, :] + ((position + HISTORY) % HISTORY)[:, None]
                kept = line_at(state, table, at, WORDS, PER_BLOCK, WIDTH) + (c % WIDTH)[None, :]
                inputs += tl.load(kept, mask=is_kept, other=0)
            total += inputs * taps[None, :]
        to = y + (start + token).to(tl.int64)[:, None] * CHANNELS + c[None, :]
        tl.store(to, total / (1 + tl.exp(-total)), mask=is_in)
        if begin == 0:
            tl.debug_barrier()  # all threads have read what is overwritten
            last = count - 1 - tl.arange(0, TOKENS)
            is_in = (last >= 0)[:, None] & is_channel[None, :]
            rows = x + (start + last).to(tl.int64)[:, None] * CHANNELS + c[None, :]
            at = line[None, :] + ((first + tl.maximum(last, 0)) % HISTORY)[:, None]
            kept = line_at(state, table, at, WORDS, PER_BLOCK, WIDTH) + (c % WIDTH)[None, :]
            tl.store(kept, tl.load(rows, mask=is_in, other=0).to(tl.float32), mask=is_in)
