"""The ops of `engine.ops.cuda` in one order of sums: what a row comes to depends on no other row (BATCH_INVARIANT=1).

Two make a difference: matrix products, whose fastest kernels add up in another order for another number of rows, and
attention, which shares a context out to more programs when there are few requests.
"""

from __future__ import annotations

from typing import Any

from engine.ops import cuda
from engine.ops.catalogue import OPS
from engine.ops.cuda.invariant.attention import head_norm_paged_attention, paged_attention
from engine.ops.cuda.invariant.products import gated_linear, linear, logits

__all__ = ["gated_linear", "head_norm_paged_attention", "linear", "logits", "paged_attention"]


def __getattr__(name: str) -> Any:
    """Return an op of the catalogue whose rows do not depend on one another on any device."""
    if name not in OPS or not OPS[name].is_row_wise:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(cuda, name)
