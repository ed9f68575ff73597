"""Gates of the outputs of attention and of Gated DeltaNet."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, next_power_of_2, wait_for_inputs

NUMBERS, HEADS = 1024, 8  # of a program


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return x / (1 + exp(-gate))."""
    y, count = torch.empty_like(x), x.numel()
    if count:
        _sigmoid[(cdiv(count, NUMBERS),)](x, gate, y, count, NUMBERS, num_warps=4, **PDL)
    return y


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """Return the `rms_norm` of each head of x [T, N] with weight [head_dim], times silu(gate)."""
    y, head_dim = torch.empty_like(x), len(weight)
    num_heads = x.shape[1] // head_dim
    if len(x):
        _norm[(len(x), cdiv(num_heads, HEADS))](
            x, gate, weight, y, epsilon, num_heads, head_dim, next_power_of_2(head_dim), HEADS, num_warps=4,
            **PDL,
        )  # fmt: skip
    return y


@kernel
def _sigmoid(x, gate, y, count, NUMBERS: tl.constexpr):
    begin_next()
    wait_for_inputs()
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    numbers = tl.load(x + at, mask=at < count, other=0).to(tl.float32)
    gates = tl.load(gate + at, mask=at < count, other=0).to(tl.float32)
    tl.store(y + at, numbers / (1 + tl.exp(-gates)), mask=at < count)


@kernel
def _norm(
    x, gate, weight, y, epsilon, NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Compute HEADS heads of one row."""
    begin_next()
    wait_for_inputs()
    head, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, PADDED)
    at = (tl.program_id(0).to(tl.int64) * NUM_HEADS + head)[:, None] * WIDTH + d[None, :]
    is_in = (head < NUM_HEADS)[:, None] & (d < WIDTH)[None, :]
    numbers = tl.load(x + at, mask=is_in, other=0).to(tl.float32)
    gates = tl.load(gate + at, mask=is_in, other=0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(numbers * numbers, 1) / WIDTH + epsilon)
    normed = numbers * scale[:, None] * tl.load(weight + d, mask=d < WIDTH, other=0)[None, :]
    tl.store(y + at, normed * gates / (1 + tl.exp(-gates)), mask=is_in)
