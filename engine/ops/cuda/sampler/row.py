"""Rows of logits as the sampler's kernels see them: in parts, with the largest logit of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import cdiv, kernel, next_power_of_2

PART = 4096  # logits a program
EVERYTHING = tl.constexpr(104.0)  # exp(-104) is 0: what lies further below the largest, in temperatures, has no weight
ALL = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class Rows:
    """S rows in P parts each, and what is kept of each row: all above `floor`, and `spare` of what equals it."""

    logits: Tensor  # f32 [S, V]
    temperature: Tensor  # f32 [S], as sent
    min_p: Tensor
    most: Tensor  # f32 [S, P]: the largest of each part
    most_ids: Tensor  # i32 [S, P]
    floor: Tensor  # f32 [S], -inf where nothing is cut off
    spare: Tensor  # i32 [S]
    weight: Tensor  # f64 [S], of what is kept; where something is cut off
    count: Tensor  # i32 [S]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the vocabulary size, the number of parts, and that number as a power of two."""
        num_parts = self.most.shape[1]
        return self.logits.shape[1], num_parts, next_power_of_2(num_parts)


def find_largest(logits: Tensor, temperature: Tensor, min_p: Tensor) -> Rows:
    """Return rows whose parts' largest logits are known, and of which everything is kept."""
    (num_rows, vocab), new = logits.shape, logits.new_empty
    num_parts = cdiv(vocab, PART)
    most, most_ids = new(num_rows, num_parts), new(num_rows, num_parts, dtype=torch.int32)
    floor, spare, count = new(num_rows), new(num_rows, dtype=torch.int32), new(num_rows, dtype=torch.int32)
    _find_largest[(num_rows, num_parts)](logits, most, most_ids, floor, spare, vocab, num_parts, PART)
    return Rows(logits, temperature, min_p, most, most_ids, floor, spare, new(num_rows, dtype=torch.float64), count)


@kernel
def _find_largest(logits, most, most_ids, floor, spare, vocab, num_parts, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids, values = load(logits + row * vocab, part * PART, vocab, PART)
    largest = tl.max(values, 0)
    tl.store(most + row * num_parts + part, largest)
    tl.store(most_ids + row * num_parts + part, tl.min(tl.where(values == largest, ids, vocab), 0))
    if part == 0:
        tl.store(floor + row, -float("inf"))
        tl.store(spare + row, ALL)


@triton.jit
def load(x, start, vocab, BLOCK: tl.constexpr):
    """Return the ids and logits from `start` on. NaN counts as banned."""
    ids = start + tl.arange(0, BLOCK)
    values = tl.load(x + ids, mask=ids < vocab, other=-float("inf"))
    return ids, tl.where(values == values, values, -float("inf"))


@triton.jit
def largest_of(most, row, num_parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(most + row * num_parts + part, mask=part < num_parts, other=-float("inf")), 0)


@triton.jit
def weights_of(values, largest, temperature, min_p):
    """Return the weights relative to that of the likeliest token, and 0 for tokens that min_p excludes."""
    weights = tl.exp((values - largest) * (1 / temperature))
    return tl.where(weights >= min_p, weights, 0.0)
