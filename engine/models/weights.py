"""Descriptions of a layer's parameters: the checkpoint tensors that they consist of, and the share of each rank.

The classes are plain values, independent of files and Paddle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np

from engine.dtypes import MXFP4_GROUP
from engine.models.config_fields import ModelError
from engine.models.formats import FLOAT32, Format, Fp8, Mxfp4Experts, common_format

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class AxisShard:
    """Share of a rank in `count` rows or columns: those from `start` to `stop`, padded with zeros to `size`."""

    count: int
    start: int
    stop: int
    size: int
    width: int = 1  # rows per head, if this is a share of heads
    paired: int = 0  # rows of a head that are adjacent rotary pairs in the checkpoint, halves in the graph
    unpaired: int = 0  # rows of a head before these
    kept: tuple[int, int] = (0, 0)  # the rows of each head that the graph has, from the first to below the second

    @classmethod
    def whole(cls, count: int) -> AxisShard:
        """Return the share of a rank that has all rows or columns."""
        return cls(count, 0, count, count)

    def each(self, width: int, paired: int = 0, unpaired: int = 0) -> AxisShard:
        """Return the share of rows or columns for this share of heads, which have `width` of them each."""
        sizes = (self.count * width, self.start * width, self.stop * width, self.size * width)
        return AxisShard(*sizes, width, paired, unpaired)

    def within(self, count: int, start: int) -> AxisShard:
        """Return the share of these rows within a larger tensor of `count` rows, in which they begin at row `start`."""
        return replace(self, count=count, start=start + self.start, stop=start + self.stop)

    def part(self, first: int, end: int) -> AxisShard:
        """Return the share of which the graph has only the rows from `first` to below `end` of each head."""
        return replace(self, kept=(first, end))

    def pieces(self, size: int) -> Iterator[AxisShard]:
        """Yield shares of `size` rows or columns each, the last one of fewer, that together are this share."""
        for first in range(0, self.size, size):
            last = min(first + size, self.size)
            start, stop = (min(self.start + each, self.stop) for each in (first, last))
            yield replace(self, start=start, stop=stop, size=last - first)

    @property
    def num_rows(self) -> int:
        """Return how many rows the graph has."""
        return self.size // self.width * (self.kept[1] - self.kept[0]) if self.kept[1] else self.size

    def order(self) -> np.ndarray:
        """Return, for each row of the graph, its index in the rank's part of the checkpoint's tensor."""
        places = np.arange(self.size).reshape(-1, self.width)
        if self.kept[1]:
            return places[:, slice(*self.kept)].reshape(-1)
        if not self.paired:
            return places.reshape(-1)
        before, pairs, behind = np.split(places, [self.unpaired, self.unpaired + self.paired], axis=1)
        turned = pairs.reshape(-1, self.paired // 2, 2).swapaxes(1, 2).reshape(pairs.shape)
        return np.concatenate([before, turned, behind], axis=1).reshape(-1)


@dataclass(frozen=True)
class Shard:
    """Options of the network of one rank: formats, block size and the rank's share of the model."""

    format: Format  # format of the matrices of linear layers
    dtype: str  # dtype of tables: embeddings, and the KV cache if it is not int8
    block_size: int
    rank: int = 0
    num_ranks: int = 1
    has_int8_cache: bool = False
    formats: Mapping[str, Format] = field(default_factory=dict, hash=False)  # of tensors for which it is not `format`
    expert_parallel: bool = False  # a rank has some of the experts, not a share of each
    column_block: int = 1  # columns of 8-bit floats that share scales in the checkpoint, if those are in blocks

    @property
    def cache_dtype(self) -> str:
        """Return the dtype of the KV cache."""
        return "int8" if self.has_int8_cache else self.dtype

    def format_of(self, tensors: Sequence[str]) -> Format | None:
        """Return the format of a matrix that consists of these tensors if one of them has a format of its own."""
        own = [self.formats.get(tensor) for tensor in tensors]
        return common_format([each or self.format for each in own]) if any(own) else None

    def inner(self, count: int) -> AxisShard:
        """Divide the `count` rows between the projections of an MLP, which are the columns of the last one, so that no
        rank begins inside of a block of the checkpoint's 8-bit floats. Shares of 4-bit floats are padded to groups."""
        if isinstance(self.format, Mxfp4Experts):
            padded = self.share(count + -count % (self.num_ranks * MXFP4_GROUP))
            return replace(padded, count=count, start=min(padded.start, count), stop=min(padded.stop, count))
        return self.share(count, self.column_block if isinstance(self.format, Fp8) else 1)

    def share(self, count: int, multiple: int = 1) -> AxisShard:
        """Divide `count` rows into equal shares that begin at multiples of `multiple`, in the order of ranks.

        If it is not divisible, the last shares are padded.
        """
        size = min(-(-count // (self.num_ranks * multiple)) * multiple, count)
        start = self.rank * size
        return AxisShard(count, min(start, count), min(start + size, count), size)

    def experts(self, count: int) -> range:
        """Return the experts of this rank: all with tensor parallelism alone. Raises ModelError for more ranks than
        experts."""
        if not self.expert_parallel:
            return range(count)
        if count < self.num_ranks:
            raise ModelError(
                f"num_ranks (MP_NUM) is {self.num_ranks}, with ENABLE_EXPERT_PARALLEL=1 it must be at most the number"
                f" of experts, which is {count}"
            )
        return experts_of_rank(count, self.rank, self.num_ranks)

    def heads(self, count: int) -> AxisShard:
        """Divide `count` heads into equal shares.

        If there are fewer heads than ranks, several ranks hold the same head.
        """
        start, size = self.rank * count // self.num_ranks, max(count // self.num_ranks, 1)
        return AxisShard(count, start, start + size, size)


def experts_of_rank(count: int, rank: int, num_ranks: int) -> range:
    """Return the experts of a rank if the ranks divide `count` of them: each has as many as the others or, if that is
    not possible, one more than the last ranks."""
    size, more = divmod(count, num_ranks)
    start, end = (each * size + min(each, more) for each in (rank, rank + 1))
    return range(start, end)


@dataclass(frozen=True)
class TensorShard:
    """One checkpoint tensor that is a part of a parameter, with the rank's share of each axis."""

    tensor: str
    axes: tuple[AxisShard, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return tuple(axis.count for axis in self.axes)

    @property
    def rank_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's share, including padding."""
        return tuple(axis.size for axis in self.axes)


@dataclass(frozen=True)
class HeadSlice:
    """The rows from `start` to `stop` of each head, which has `width` of them, as a matrix of the head."""

    width: int
    start: int
    stop: int
    is_turned: bool = False  # the matrix is transposed

    def of(self, matrix: np.ndarray) -> np.ndarray:
        """Return the matrices of all heads, stacked."""
        heads = matrix.reshape(-1, self.width, matrix.shape[1])[:, self.start : self.stop]
        heads = heads.swapaxes(1, 2) if self.is_turned else heads
        return np.ascontiguousarray(heads.reshape(-1, heads.shape[2]))

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the result for a matrix of this shape."""
        count, size = rows // self.width, self.stop - self.start
        return (count * columns, size) if self.is_turned else (count * size, columns)


@dataclass(frozen=True)
class Weight:
    """A weight of the graph: its parts, stacked along the first axis and stored in a format."""

    name: str
    parts: tuple[TensorShard, ...]
    format: Format = FLOAT32
    offset: float = 0.0  # added to the values of the checkpoint
    of_heads: HeadSlice | None = None  # rows of each head that are kept of a matrix in a `Dense` format; None: all

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the matrix that the graph stores."""
        rows, *inner = self.read_shape
        if self.of_heads:
            return self.of_heads.shape(rows, *inner)
        return (sum(part.axes[0].num_rows for part in self.parts), *inner)

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Return the shape of what is read for it: rows that the graph does not have are left out later."""
        return (sum(part.rank_shape[0] for part in self.parts), *self.parts[0].rank_shape[1:])

    def in_order(self, arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """Reorder the rows of the arrays of this weight from the checkpoint's order to that of the graph."""
        if self.of_heads:
            return tuple(self.of_heads.of(array) for array in arrays)
        of_parts = [part.axes[0] for part in self.parts]
        if not any(rows.paired or rows.kept[1] for rows in of_parts):
            return arrays
        starts = np.cumsum([0, *(rows.size for rows in of_parts[:-1])])
        order = np.concatenate([start + rows.order() for start, rows in zip(starts, of_parts, strict=True)])
        return tuple(array[order] for array in arrays)


@dataclass(frozen=True, eq=False)
class Constant:
    """A parameter of the graph whose values depend only on config.json."""

    name: str
    values: np.ndarray


def found_in(layer: Any, kind: type[Kind]) -> Iterator[Kind]:
    """Yield all objects of class `kind` in a layer and the layers inside it, in the order of their fields."""
    if isinstance(layer, kind):
        yield layer
    elif isinstance(layer, tuple):
        for item in layer:
            yield from found_in(item, kind)
    elif is_dataclass(layer):
        for field in fields(layer):
            yield from found_in(getattr(layer, field.name), kind)


def weights_of(layer: Any) -> Mapping[str, Weight]:
    """Return the weights of a layer by name. A table that is used twice appears once."""
    return {weight.name: weight for weight in found_in(layer, Weight)}
