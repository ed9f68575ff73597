"""Matrix products and the choice of rows: what torch does as well as a kernel of our own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times weight [N, K]: [T, N] in the type of x, which is the weight's."""
    return functional.linear(x, weight, bias)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` for the last one of a graph: its sums stay float32. [S, K], [V, K] -> f32 [S, V]."""
    if x.dtype == torch.float32:
        return functional.linear(x, weight)
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows)
