"""What a KV cache of a graph looks like, axis by axis: who allocates, copies or sends one needs no other knowledge."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.dtypes import held_as

BLOCK, POSITION = "block", "position"  # the axes every cache has: blocks of the pool, tokens of a block
ATTENTION_AXES = (BLOCK, "key_or_value", "head", POSITION, "element")


@dataclass(frozen=True)
class CacheSpec:
    """One cache of one rank: an input of the graph that it updates in place."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # -1: as many blocks as are allocated
    axes: tuple[str, ...]  # what each axis of the shape counts

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.shape[self.axes.index(POSITION)]

    @property
    def block_bytes(self) -> int:
        return math.prod(self.shape_of(1)) * held_as(self.dtype).itemsize

    def shape_of(self, num_blocks: int) -> tuple[int, ...]:
        return tuple(num_blocks if axis == BLOCK else size for axis, size in zip(self.axes, self.shape, strict=True))
