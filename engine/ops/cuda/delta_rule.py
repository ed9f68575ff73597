"""The gated delta rule in chunks, in one order of sums whatever the steps are that compute a prompt.

Three kernels follow one another. The first normalizes queries and keys and computes decays. The second computes a value
head in blocks of BLOCK positions, at multiples of BLOCK: products with the state and with the updates of earlier blocks
of the chunk are matrix products, whose rows do not depend on one another, and the positions of a block follow one
another in a loop. A step of one token runs the same block with one new row if BATCH_INVARIANT=1, and otherwise a kernel
that reads the state as fast as it comes. The third kernel writes the keys, updates
and decays of the open chunk to the lines of the state, which the second one still reads.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor

from engine.core.cache_groups import MAX_REJECTED
from engine.ops.catalogue_states import CHUNK, OPEN
from engine.ops.cuda import delta_rule_kernels as kernels
from engine.ops.cuda.launch import PDL, new_indices, num_sms
from engine.ops.cuda.prefill_attention import KnownStarts
from engine.ops.cuda.states import starts_of, words_of

BLOCK = 16  # positions
COLUMNS, WARPS = 32, 4  # of a value head, for a program of the second kernel
DEPTH = 32  # elements of a key at a time
HEADS = 4  # queries and keys of a program of the first kernel


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
    inputs = qkv.new_empty(num_tokens, 2 * num_k_heads * head_dim, dtype=torch.float32)
    updates = qkv.new_empty(num_tokens, num_v_heads * head_dim, dtype=torch.float32)
    factors = qkv.new_empty(num_tokens, 2 * num_v_heads, dtype=torch.float32)
    bases = new_indices(context_lens, num_requests)
    has_drafts = num_tokens != num_requests  # or prompts
    ahead = inputs.new_empty(num_requests * num_v_heads * head_dim**2) if has_drafts else inputs
    where = starts_of(query_starts), context_lens, state_tables
    padded = triton.next_power_of_2(head_dim)
    heads, block = (num_k_heads, num_v_heads, head_dim, padded), (words.shape[1], words.shape[1] // head_dim)
    sizes = state_tables.shape[1], first_line, *heads, *block, CHUNK, OPEN
    kernels.prepare[(num_tokens, triton.cdiv(2 * num_k_heads, HEADS))](
        qkv, gates, a_log, dt_bias, words, *where, inputs, factors, bases, num_requests, *sizes,
        num_tokens == num_requests, HEADS, triton.next_power_of_2(num_v_heads), num_warps=4, **PDL,
    )  # fmt: skip
    given = qkv, inputs, factors, bases, words, *where, updates, ahead, out, *sizes
    if is_invariant or has_drafts:
        columns = min(padded, COLUMNS)
        kernels.advance[(num_requests, num_v_heads, triton.cdiv(head_dim, columns))](
            *given, MAX_REJECTED, BLOCK, columns, min(padded, DEPTH), num_warps=WARPS, num_stages=1, **PDL
        )
    else:
        columns = padded if num_requests * num_v_heads >= num_sms() else min(padded, COLUMNS)
        kernels.advance_one[(num_requests, num_v_heads, triton.cdiv(head_dim, columns))](
            *given, columns, min(padded, DEPTH), num_warps=8 if columns > COLUMNS else WARPS, num_stages=1, **PDL
        )
    kernels.keep[(num_requests, num_k_heads + num_v_heads)](
        inputs, factors, bases, words, *where, updates, *sizes, MAX_REJECTED, triton.next_power_of_2(OPEN),
        num_warps=8, **PDL,
    )  # fmt: skip
    return out, state


invariant_gated_delta_rule = partial(gated_delta_rule, is_invariant=True)
