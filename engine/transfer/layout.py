"""Layout of a block that all ranks of an instance have shares of, and its conversion for another number of ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.core.cache_groups import STATE
from engine.exporting.manifest import Manifest


class BlockLayout(NamedTuple):
    """Sizes of the axes of what `BlockAccess.read_block` returns, [num_ranks, num_outer, num_heads, num_bytes].

    Each rank has `num_heads` KV heads in order, or all of the block as one, of which all ranks have a copy. If there
    are more ranks than heads, neighbours have the same one.
    """

    num_ranks: int
    num_outer: int  # caches, times keys and values
    num_heads: int
    num_bytes: int
    is_copied: bool  # all ranks have the same content
    is_fixed: bool = False  # it has states, which are laid out for this number of ranks

    @classmethod
    def of(cls, model: Manifest) -> BlockLayout:
        graph = model.graph()
        spec = graph.caches[0]  # all have the same shape
        is_copied = "head" not in spec.axes
        sizes = dict(zip(spec.axes, spec.shape, strict=True))
        num_outer = 1 if is_copied else len(graph.caches) * sizes["key_or_value"]
        num_heads, block_bytes = 1 if is_copied else sizes["head"], sum(each.block_bytes for each in graph.caches)
        is_fixed = any(group.kind == STATE for group in graph.cache_groups)
        return cls(model.num_ranks, num_outer, num_heads, block_bytes // (num_outer * num_heads), is_copied, is_fixed)

    @property
    def block_bytes(self) -> int:
        """Return the size of a block on all ranks together."""
        return self.num_ranks * self.num_outer * self.num_heads * self.num_bytes

    def difference(self, other: BlockLayout) -> str:
        """Return why blocks of `other` cannot be converted to this layout, or an empty text."""
        if self == other:
            return ""
        ranks = f"it has {other.num_ranks} ranks, this instance {self.num_ranks}"
        if self.is_fixed:
            return f"{ranks}; the states of this model need equal numbers"
        if self._replace(num_ranks=0, num_heads=0) != other._replace(num_ranks=0, num_heads=0):
            return "its blocks have another layout"
        if not self.is_copied and max(self._num_held, other._num_held) % min(self._num_held, other._num_held):
            return f"{ranks}; of numbers above that of KV heads, one must be a multiple of the other"
        return ""

    def convert(self, content: bytes | memoryview, source: BlockLayout) -> bytes | memoryview:
        """Return a block of the layout `source`, which has no `difference`, in this one."""
        if self == source:
            return content
        num_distinct = 1 if self.is_copied else min(self._num_held, source._num_held)
        found = np.frombuffer(content, np.uint8).reshape(source[:4]).swapaxes(0, 1)
        found = found.reshape(self.num_outer, source._num_held, self.num_bytes)
        heads = np.repeat(found[:, :: source._num_held // num_distinct], self._num_held // num_distinct, axis=1)
        shares = heads.reshape(self.num_outer, self.num_ranks, self.num_heads, self.num_bytes)
        return shares.swapaxes(0, 1).tobytes()

    @property
    def _num_held(self) -> int:
        """Return the number of KV heads of all ranks, the same ones counted again."""
        return self.num_ranks * self.num_heads
