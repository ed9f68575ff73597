"""Shapes of the KV caches of a graph, and how the layers of several cache groups share them. Code that allocates,
copies or sends a cache depends on nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.core.cache_groups import STATE, CacheGroup, table_name
from engine.dtypes import held_as
from engine.models.config_fields import ModelError

BLOCK, POSITION = "block", "position"  # axes that every cache has: blocks of the pool, and tokens of a block
ATTENTION_AXES = (BLOCK, "key_or_value", "head", POSITION, "element")


@dataclass(frozen=True)
class CacheSpec:
    """One KV cache of one rank: an input that the graph updates in place."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # -1: the number of blocks that are allocated
    axes: tuple[str, ...]  # what each axis of the shape counts

    @property
    def block_size(self) -> int:
        """Return the number of tokens that a block holds."""
        return self.shape[self.axes.index(POSITION)]

    @property
    def block_bytes(self) -> int:
        """Return the size of one block in bytes."""
        return math.prod(self.shape_of(1)) * held_as(self.dtype).itemsize

    def shape_of(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of a cache with `num_blocks` blocks."""
        return tuple(num_blocks if axis == BLOCK else size for axis, size in zip(self.axes, self.shape, strict=True))


MAX_PADDING = 0.05  # fraction of the memory that a layout may leave unused


@dataclass(frozen=True)
class LayerCache:
    """The KV cache that one layer needs, and the cache group whose blocks it uses.

    The shape of a state is its number of lines and the width of a line, f32 (`engine.ops.catalogue_states`).
    """

    layer: int
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...] = ATTENTION_AXES
    group: CacheGroup = CacheGroup()


@dataclass(frozen=True)
class CacheLayout:
    """Layout of the KV caches of a graph.

    A block of the pool is one row of every cache. It belongs to one cache group at a time, and each layer of that group
    uses the row of one cache. So any mix of groups can use the whole memory.
    """

    caches: tuple[CacheSpec, ...]
    groups: tuple[CacheGroup, ...]
    inputs: Mapping[int, tuple[str, str]]  # layer -> names of its cache and its block table, both inputs of the graph

    @classmethod
    def of(cls, layers: Sequence[LayerCache]) -> CacheLayout:
        """Divide the layers of each kind into groups of equal size, as few as waste at most MAX_PADDING of the memory.

        A state fills as many blocks as it needs. Raises ModelError if the caches of other layers differ in size.
        """
        paged = [each for each in layers if each.group.kind != STATE]
        if not paged:
            raise ModelError("models without attention are not supported yet")
        if any(
            (each.dtype, each.shape, each.axes) != (paged[0].dtype, paged[0].shape, paged[0].axes) for each in paged
        ):
            raise ModelError("layers whose KV caches differ in size are not supported yet")
        spec = CacheSpec("kv_cache_0", paged[0].dtype, paged[0].shape, paged[0].axes)
        by_kind: dict[CacheGroup, list[LayerCache]] = {each.group: [] for each in paged}
        for each in layers:
            kind = each.group if each.group.kind != STATE else replace(each.group, num_parts=_num_parts(each, spec))
            by_kind.setdefault(kind, []).append(each)
        size = _group_size([len(members) for members in by_kind.values()])
        groups: list[CacheGroup] = []
        inputs = {}
        for kind, members in by_kind.items():
            for start in range(0, len(members), size):
                for slot, member in enumerate(members[start : start + size]):
                    inputs[member.layer] = f"kv_cache_{slot}", table_name(len(groups))
                groups.append(kind)
        caches = [replace(spec, name=f"kv_cache_{slot}") for slot in range(size)]
        return cls(tuple(caches), tuple(groups), inputs)


def _num_parts(state: LayerCache, spec: CacheSpec) -> int:
    """Return how many blocks hold the lines of a state. Raises ModelError if a block is smaller than a line."""
    num_lines, width = state.shape
    if not (lines_per_block := spec.block_bytes // (4 * width)):
        raise ModelError(f"a block of {spec.block_size} tokens is smaller than a line of the state: raise BLOCK_SIZE")
    return -(-num_lines // lines_per_block)


def _group_size(counts: Sequence[int]) -> int:
    """Return the largest group size that wastes at most MAX_PADDING, given the number of layers of each kind."""
    for size in range(max(counts), 1, -1):
        num_slots = sum(-(-count // size) * size for count in counts)
        if sum(counts) >= (1 - MAX_PADDING) * num_slots:
            return size
    return 1
