"""The KV caches of a graph, axis by axis, and how the layers of several cache groups share them. Code that allocates,
copies or sends a cache needs to know nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.core.cache_groups import CacheGroup, table_name
from engine.dtypes import held_as
from engine.models.keys import ModelError

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


MAX_PADDING = 0.05  # share of the memory that a layout may leave unused


@dataclass(frozen=True)
class LayerCache:
    """The cache that one layer needs, and the group whose blocks it uses."""

    layer: int
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...] = ATTENTION_AXES
    group: CacheGroup = CacheGroup()


@dataclass(frozen=True)
class CacheLayout:
    """The caches of a graph. A block of the pool is one row of all of them. It belongs to one group at a time, of which
    each layer uses one of the caches, so that any mix of groups can use the whole memory."""

    caches: tuple[CacheSpec, ...]
    groups: tuple[CacheGroup, ...]
    inputs: Mapping[int, tuple[str, str]]  # layer -> its cache and its block table, inputs of the graph

    @classmethod
    def of(cls, layers: Sequence[LayerCache]) -> CacheLayout:
        """Layers of one kind form groups of equal size, as few as waste at most MAX_PADDING of the memory. Raises
        ModelError where the layers' caches differ in size."""
        by_kind: dict[CacheGroup, list[LayerCache]] = {}
        for each in layers:
            by_kind.setdefault(each.group, []).append(each)
        if any(
            (each.dtype, each.shape, each.axes) != (layers[0].dtype, layers[0].shape, layers[0].axes) for each in layers
        ):
            raise ModelError("layers whose KV caches differ in size are not supported yet")
        size = _group_size([len(members) for members in by_kind.values()])
        groups: list[CacheGroup] = []
        inputs = {}
        for kind, members in by_kind.items():
            for start in range(0, len(members), size):
                for slot, member in enumerate(members[start : start + size]):
                    inputs[member.layer] = f"kv_cache_{slot}", table_name(len(groups))
                groups.append(kind)
        caches = [
            CacheSpec(f"kv_cache_{slot}", each.dtype, each.shape, each.axes) for slot, each in enumerate(layers[:size])
        ]
        return cls(tuple(caches), tuple(groups), inputs)


def _group_size(counts: Sequence[int]) -> int:
    """Return the largest number of layers in a group with which `counts` layers of each kind waste little."""
    for size in range(max(counts), 1, -1):
        num_slots = sum(-(-count // size) * size for count in counts)
        if sum(counts) >= (1 - MAX_PADDING) * num_slots:
            return size
    return 1
