"""The ops of `engine.ops.cuda` in one order of sums: what a row comes to depends on no other row (BATCH_INVARIANT=1).

Two make a difference: matrix products, whose fastest kernels add up in another order for another number of rows, and
attention, which shares a context out to more programs when there are few requests.
"""

from engine.ops.cuda import (
    add_rms_norm,
    embedding,
    gather_rows,
    head_norm,
    last_tokens_in,
    rms_norm,
    rotary_angles,
    swiglu,
)
from engine.ops.cuda.invariant.attention import paged_attention
from engine.ops.cuda.invariant.products import gated_linear, linear, logits

__all__ = [
    "add_rms_norm",
    "embedding",
    "gated_linear",
    "gather_rows",
    "head_norm",
    "last_tokens_in",
    "linear",
    "logits",
    "paged_attention",
    "rms_norm",
    "rotary_angles",
    "swiglu",
]
