"""The gated delta rule in chunks, in one order of sums whatever the steps are that compute a prompt.

The first kernel computes decays and betas. Prompts, drafts and, with BATCH_INVARIANT=1, single tokens are computed in
chunks of CHUNK positions, at multiples of CHUNK (delta_rule_chunks.py): one kernel prepares all chunks at once, the
next one goes over the chunks of each value head and begins with those that earlier steps left open, whose keys, values,
decays and betas are kept in the state. Otherwise, a step of one token runs a kernel that reads the state as fast as
memory allows (delta_rule_decode.py). The last kernel writes what is kept of the positions of the step.

The state has the lines of the catalogue, but is stored at multiples of CHUNK positions, and the lines of updates hold
KEPT updates and KEPT values. Keys are stored as they come, because in bfloat16 a product with them takes half as many
products of the tensor cores as one with normalized keys.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor

from engine.core.cache_groups import MAX_REJECTED
from engine.ops.catalogue_states import OPEN
from engine.ops.cuda import delta_rule_chunks as chunks
from engine.ops.cuda import delta_rule_decode as decode
from engine.ops.cuda import delta_rule_kernels as kernels
from engine.ops.cuda.launch import PDL, new_indices, num_sms
from engine.ops.cuda.prefill_attention import KnownStarts
from engine.ops.cuda.states import starts_of, words_of

CHUNK, KEPT = kernels.CHUNK.value, kernels.KEPT.value
assert MAX_REJECTED + CHUNK <= KEPT <= OPEN // 2
COLUMNS, WARPS = 32, 4  # of a value head, for a program of a step of single tokens
STAGES = 3  # chunks that are loaded at a time
DEPTH = 32  # elements of a key at a time


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
    num_k_heads: int,
    num_v_heads: int,
    head_dim: int,
    first_line: int,
    is_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule of qkv [T, (2 Hk + Hv) D] with gates [T, 2 Hv]. Return [T, Hv D], and the state,
    which is updated in place.
    """
    num_tokens, num_requests, words = len(qkv), len(context_lens), words_of(state)
    out = qkv.new_empty(num_tokens, num_v_heads * head_dim)
    if not num_tokens:
        return out, state
    factors = qkv.new_empty(num_tokens, 2 * num_v_heads, dtype=torch.float32)
    bases = new_indices(context_lens, num_requests)
    is_one_each = num_tokens == num_requests
    updates = factors.new_empty(num_tokens, num_v_heads * head_dim) if is_one_each else factors
    where = starts_of(query_starts), context_lens, state_tables
    padded = triton.next_power_of_2(head_dim)
    block = words.shape[1], words.shape[1] // head_dim
    sizes = state_tables.shape[1], first_line, num_k_heads, num_v_heads, head_dim, padded, *block, OPEN
    kernels.prepare[(num_tokens,)](
        gates, a_log, dt_bias, words, *where, factors, bases, num_requests, state_tables.shape[1], first_line,
        num_v_heads, head_dim, *block, OPEN, is_one_each, triton.next_power_of_2(num_v_heads), num_warps=1, **PDL,
    )  # fmt: skip
    given = qkv, factors, bases, words, *where
    if is_invariant or not is_one_each:
        spare = 2 if is_one_each else 3  # a step begins up to CHUNK + MAX_REJECTED positions behind the stored state
        num_tiles = num_tokens // CHUNK + spare * num_requests
        products = factors.new_empty(num_tiles * num_v_heads, chunks.PRODUCTS.value)
        chunks.prepare_chunks[(num_tiles, num_k_heads)](
            *given, products, num_requests, *sizes, spare, min(padded, DEPTH), num_warps=1, num_stages=1, **PDL
        )
        columns = chunks.COLUMNS.value
        # It does not begin early (PDL): few programs, which run long, would share the SMs that have room first.
        chunks.advance[(num_requests, num_v_heads, triton.cdiv(head_dim, columns))](
            *given, products, out, *sizes, spare, MAX_REJECTED, STAGES, num_warps=1, num_stages=1
        )
    else:
        columns = padded if num_requests * num_v_heads >= num_sms() else min(padded, COLUMNS)
        decode.advance_one[(num_requests, num_v_heads, triton.cdiv(head_dim, columns))](
            *given, updates, out, *sizes, columns, min(padded, DEPTH),
            num_warps=8 if columns > COLUMNS else WARPS, num_stages=1, **PDL,
        )  # fmt: skip
    kernels.keep[(num_requests, num_k_heads + num_v_heads)](
        *given, updates, *sizes, MAX_REJECTED, is_one_each and not is_invariant, num_warps=8, **PDL
    )
    return out, state


invariant_gated_delta_rule = partial(gated_delta_rule, is_invariant=True)
