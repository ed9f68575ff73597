"""What a layer asks of a checkpoint and of its rank: parameters, the tensors they are made of, the shares of ranks.

Plain values: no files, no Paddle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np

from engine.models.formats import FLOAT32, Format

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Share:
    """Those of `count` rows or columns that a rank holds, and zeros after them if its `size` is more."""

    count: int
    start: int
    stop: int
    size: int
    width: int = 1  # rows of a head, where it is a share of heads
    paired: int = 0  # of the first so many of a head the checkpoint has 0 and 1, 2 and 3 .. where the graph has halves

    @classmethod
    def whole(cls, count: int) -> Share:
        return cls(count, 0, count, count)

    def each(self, width: int, paired: int = 0) -> Share:
        """The same, where each has `width` rows or columns."""
        return Share(self.count * width, self.start * width, self.stop * width, self.size * width, width, paired)

    def within(self, count: int, start: int) -> Share:
        """The same rows in a tensor of `count` rows, where they begin at `start`."""
        return replace(self, count=count, start=start + self.start, stop=start + self.stop)

    def order(self) -> np.ndarray:
        """Where in the rank's part of a tensor that is which the graph has first, second .."""
        if not self.paired:
            return np.arange(self.size)
        places = np.arange(self.size).reshape(-1, self.width)
        turned = places[:, : self.paired].reshape(-1, self.paired // 2, 2).swapaxes(1, 2)
        return np.concatenate([turned.reshape(-1, self.paired), places[:, self.paired :]], axis=1).reshape(-1)


@dataclass(frozen=True)
class Shard:
    """How the network of one rank is made."""

    format: Format  # of the matrices of linear layers
    dtype: str  # of tables
    block_size: int
    rank: int = 0
    num_ranks: int = 1
    has_int8_cache: bool = False
    plain: frozenset[str] = frozenset()  # tensors of linear layers whose matrices have the dtype of tables instead

    @property
    def cache_dtype(self) -> str:
        return "int8" if self.has_int8_cache else self.dtype

    def share(self, count: int) -> Share:
        """Equal shares, one rank after another. What `count` lacks to be divisible is missing at the end."""
        size = -(-count // self.num_ranks)
        start = self.rank * size
        return Share(count, min(start, count), min(start + size, count), size)

    def heads(self, count: int) -> Share:
        """Equal shares; of fewer heads than ranks one, which the ranks beside it hold as well."""
        start, size = self.rank * count // self.num_ranks, max(count // self.num_ranks, 1)
        return Share(count, start, start + size, size)


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor that goes into a parameter."""

    tensor: str
    axes: tuple[Share, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(axis.count for axis in self.axes)

    @property
    def rank_shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)


@dataclass(frozen=True)
class Weight:
    """A weight of the graph: its parts stacked along the first axis, stored in a format."""

    name: str
    parts: tuple[Part, ...]
    format: Format = FLOAT32
    offset: float = 0.0  # added to what the checkpoint has

    @property
    def shape(self) -> tuple[int, ...]:
        """What this rank holds."""
        first = self.parts[0].rank_shape
        return (sum(part.rank_shape[0] for part in self.parts), *first[1:])

    def in_order(self, arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """Rows, as the checkpoint has those of one part after the other, as the graph has them."""
        of_parts = [part.axes[0] for part in self.parts]
        if not any(rows.paired for rows in of_parts):
            return arrays
        starts = np.cumsum([0, *(rows.size for rows in of_parts[:-1])])
        order = np.concatenate([start + rows.order() for start, rows in zip(starts, of_parts, strict=True)])
        return tuple(array[order] for array in arrays)


@dataclass(frozen=True, eq=False)
class Constant:
    """A parameter that follows from config.json."""

    name: str
    values: np.ndarray


def found_in(layer: Any, kind: type[Kind]) -> Iterator[Kind]:
    """All of `kind` that a layer and the layers in it are described with, in the order of their fields."""
    if isinstance(layer, kind):
        yield layer
    elif isinstance(layer, tuple):
        for item in layer:
            yield from found_in(item, kind)
    elif is_dataclass(layer):
        for field in fields(layer):
            yield from found_in(getattr(layer, field.name), kind)


def weights_of(layer: Any) -> Mapping[str, Weight]:
    """By name: a table that is used twice is one parameter."""
    return {weight.name: weight for weight in found_in(layer, Weight)}
