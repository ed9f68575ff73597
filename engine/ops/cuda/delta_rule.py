"""The gated delta rule in chunks, in one order of sums whatever the steps are that compute a prompt.

Prompts, drafts and, with BATCH_INVARIANT=1, single tokens are computed in chunks of CHUNK positions, at multiples of
CHUNK (delta_rule_chunks.py). The first kernel computes decays and betas, the second prepares all chunks at once. The
third goes over the chunks of each value head and begins with those that earlier steps left open, whose keys, values,
decays and betas are kept in the state. The last one writes what is kept of the positions of the step. Otherwise, a step
of one token runs one kernel that reads the state as fast as memory allows (delta_rule_decode.py) and also computes the
convolution and the norm of the layer.

The state has the lines of the catalogue, but is stored at multiples of CHUNK positions, and the lines of updates hold
KEPT updates and KEPT values. Keys are stored as they come, because in bfloat16 a product with them takes half as many
products of the tensor cores as one with normalized keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.core.cache_groups import MAX_REJECTED
from engine.ops.catalogue_states import HISTORY, OPEN
from engine.ops.cuda import delta_rule_chunks as chunks
from engine.ops.cuda import delta_rule_kernels as kernels
from engine.ops.cuda.delta_rule_decode import decode_step
from engine.ops.cuda.gates import gated_rms_norm
from engine.ops.cuda.launch import PDL, cdiv, new_indices, next_power_of_2
from engine.ops.cuda.prefill_attention import KnownStarts
from engine.ops.cuda.recurrent_states import causal_conv, starts_of, words_of

CHUNK, KEPT = kernels.CHUNK.value, kernels.KEPT.value
assert MAX_REJECTED + CHUNK <= KEPT and 2 * KEPT + CHUNK <= OPEN
STAGES = 3  # chunks that are loaded at a time
DEPTH = 32  # elements of a key at a time
# Of a step of single tokens: rows of the state at a time, how many times as many are read ahead, and rows at a time
# where the state is stored.
ROWS, AHEAD, STORED_ROWS = 8, 4, 32
DECODE_OPTIONS = {"num_warps": 4, "num_stages": 1, "maxnreg": 128}


class DeltaSizes(NamedTuple):
    """Attributes of the op."""

    num_k_heads: int
    num_v_heads: int
    head_dim: int
    first_line: int


class ConvAndNorm(NamedTuple):
    """Parameters of the convolution before the rule and of the norm behind it."""

    taps: Tensor
    gate: Tensor
    weight: Tensor
    epsilon: float


def gated_delta_net(  # noqa: PLR0913 - the inputs of the three ops, in their order
    x: Tensor,
    taps: Tensor,
    state: Tensor,
    query_starts: Tensor | KnownStarts,
    context_lens: Tensor,
    state_tables: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    _state: Tensor,
    _query_starts: Tensor | KnownStarts,
    _context_lens: Tensor,
    _state_tables: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    epsilon: float,
    **sizes: Any,
) -> tuple[Tensor, Tensor]:
    """Compute `causal_conv`, `gated_delta_rule` and `gated_rms_norm`, in one kernel if each request has one token.
    Return [T, Hv D], and the state, which is updated in place.
    """
    where, of_gates = (state, query_starts, context_lens, state_tables), (gates, a_log, dt_bias)
    if len(x) == len(context_lens):
        arrays = *of_gates, state, context_lens, state_tables
        return _decode_step(x, arrays, DeltaSizes(**sizes), ConvAndNorm(taps, gate, weight, epsilon)), state
    qkv, _ = causal_conv(x, taps, *where, head_dim=sizes["head_dim"])
    out, _ = gated_delta_rule(qkv, *of_gates, *where, **sizes)
    return gated_rms_norm(out, gate, weight, epsilon=epsilon), state


def gated_delta_rule(  # noqa: PLR0913 - the inputs of the catalogue, in its order
    qkv: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    query_starts: Tensor | KnownStarts,
    context_lens: Tensor,
    state_tables: Tensor,
    *,
    is_invariant: bool = False,
    **given_sizes: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule of qkv [T, (2 Hk + Hv) D] with gates [T, 2 Hv]. Return [T, Hv D], and the state,
    which is updated in place.
    """
    num_tokens, num_requests, words = len(qkv), len(context_lens), words_of(state)
    is_one_each = num_tokens == num_requests
    if is_one_each and not is_invariant:
        arrays = gates, a_log, dt_bias, state, context_lens, state_tables
        return _decode_step(qkv, arrays, DeltaSizes(**given_sizes)), state
    num_k_heads, num_v_heads, head_dim, first_line = DeltaSizes(**given_sizes)
    out = qkv.new_empty(num_tokens, num_v_heads * head_dim)
    if not num_tokens:
        return out, state
    factors = qkv.new_empty(num_tokens, 2 * num_v_heads, dtype=torch.float32)
    bases = new_indices(context_lens, num_requests)
    where = starts_of(query_starts), context_lens, state_tables
    padded = next_power_of_2(head_dim)
    block = words.shape[1], words.shape[1] // head_dim
    sizes = state_tables.shape[1], first_line, num_k_heads, num_v_heads, head_dim, padded, *block, OPEN
    kernels.compute_gates[(num_tokens,)](
        gates, a_log, dt_bias, words, *where, factors, bases, num_requests, state_tables.shape[1], first_line,
        num_v_heads, head_dim, *block, OPEN, is_one_each, next_power_of_2(num_v_heads), num_warps=1, **PDL,
    )  # fmt: skip
    inputs = qkv, factors, bases, words, *where
    spare = 2 if is_one_each else 3  # a step begins up to CHUNK + MAX_REJECTED positions behind the stored state
    num_tiles = num_tokens // CHUNK + spare * num_requests
    products = factors.new_empty(num_tiles * num_v_heads, chunks.PRODUCTS.value)
    chunks.prepare_chunks[(num_tiles, num_k_heads)](
        *inputs, products, num_requests, *sizes, spare, min(padded, DEPTH), num_warps=1, num_stages=1, **PDL
    )
    columns = chunks.COLUMNS.value
    # It does not begin early (PDL): few programs, which run long, would share the SMs that have room first.
    chunks.scan_chunks[(num_requests, num_v_heads, cdiv(head_dim, columns))](
        qkv, bases, words, *where, products, out, *sizes, spare, MAX_REJECTED, STAGES, num_warps=1, num_stages=1
    )
    kernels.store_open_positions[(num_requests, num_k_heads + num_v_heads)](
        *inputs, *sizes, MAX_REJECTED, num_warps=8, **PDL
    )
    return out, state


def _decode_step(
    x: Tensor, arrays: Sequence[Tensor], sizes: DeltaSizes, conv_and_norm: ConvAndNorm | None = None
) -> Tensor:  # fmt: skip
    """Compute one token of each request, whose `x` are the inputs of the convolution if that is computed, too."""
    *gates, state, context_lens, state_tables = arrays
    num_k_heads, num_v_heads, head_dim, first_line = sizes
    words, out = words_of(state), x.new_empty(len(x), num_v_heads * head_dim)
    padded = next_power_of_2(head_dim)
    rows = x.new_empty(len(x), num_v_heads, 2, padded, dtype=torch.float32)
    taps, gate, weight, epsilon = conv_and_norm or ConvAndNorm(x, x, x, 0.0)
    if len(x):
        decode_step[(len(x), num_v_heads)](
            x, taps, *gates, words, context_lens, state_tables, gate, weight, rows, out, epsilon, state_tables.shape[1],
            first_line, num_k_heads, num_v_heads, head_dim, padded, words.shape[1], words.shape[1] // head_dim, OPEN,
            HISTORY, taps.shape[2] if conv_and_norm else 0, conv_and_norm is not None, ROWS, min(AHEAD, padded // ROWS),
            min(STORED_ROWS, padded), **DECODE_OPTIONS, **PDL,
        )  # fmt: skip
    return out


invariant_gated_delta_rule = partial(gated_delta_rule, is_invariant=True)
