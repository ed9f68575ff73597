"""The ops of `engine.ops.cuda` in one order of sums: what a row comes to depends on no other row (BATCH_INVARIANT=1).

Two make a difference: matrix products, whose fastest kernels add up in another order for another number of rows, and
attention, which shares a context out to more programs when there are few requests.
"""

from __future__ import annotations

from typing import Any

from engine.ops import cuda
from engine.ops.catalogue import OPS
from engine.ops.cuda.delta_rule import invariant_gated_delta_rule as gated_delta_rule
from engine.ops.cuda.experts import invariant_expert_down as expert_down
from engine.ops.cuda.experts import invariant_expert_down_fp8 as expert_down_fp8
from engine.ops.cuda.experts import invariant_expert_gate_up as expert_gate_up
from engine.ops.cuda.experts import invariant_expert_gate_up_fp8 as expert_gate_up_fp8
from engine.ops.cuda.head_products import invariant_head_linear as head_linear
from engine.ops.cuda.invariant.attention import head_norm_paged_attention, paged_attention
from engine.ops.cuda.invariant.fp8 import gated_linear_a8w8_fp8, linear_a8w8_fp8
from engine.ops.cuda.invariant.mla import latent_attention
from engine.ops.cuda.invariant.products import gated_linear, linear, logits
from engine.ops.cuda.recurrent_states import causal_conv

__all__ = [
    "causal_conv",
    "expert_down",
    "expert_down_fp8",
    "expert_gate_up",
    "expert_gate_up_fp8",
    "gated_delta_rule",
    "gated_linear",
    "gated_linear_a8w8_fp8",
    "head_linear",
    "head_norm_paged_attention",
    "latent_attention",
    "linear",
    "linear_a8w8_fp8",
    "logits",
    "paged_attention",
]


def __getattr__(name: str) -> Any:
    """Return an op of the catalogue whose rows do not depend on one another on any device."""
    if name not in OPS or not OPS[name].is_row_wise:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(cuda, name)
