"""Tensors as the files of a checkpoint have them: shape, dtype and slices, of which nothing is read before it is asked
for. Those here are put together of others; safetensors' own handles can be used in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "uint8": "U8"}  # safetensors' by numpy's


class Stored(Protocol):
    def get_dtype(self) -> str: ...  # as safetensors spells it
    def get_shape(self) -> list[int]: ...
    def __getitem__(self, key: Any) -> np.ndarray: ...  # slices, or Ellipsis


@dataclass(frozen=True, eq=False)
class Joined:
    """Arrays, or what has their shape and slices, one after another along an axis."""

    parts: tuple[Any, ...]
    axis: int = 0

    def get_dtype(self) -> str:
        return NAMES[self.parts[0].dtype.name]

    def get_shape(self) -> list[int]:
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return shape

    def __getitem__(self, key: Any) -> np.ndarray:
        keys = list(slices(key, self.get_shape()))
        start, stop = keys[self.axis].start, keys[self.axis].stop
        found = []
        for part in self.parts:
            size = part.shape[self.axis]
            keys[self.axis] = slice(min(max(start, 0), size), min(max(stop, 0), size))
            found.append(part[tuple(keys)])
            start, stop = start - size, stop - size
        return np.concatenate(found, axis=self.axis)


def slices(key: Any, shape: Sequence[int]) -> tuple[slice, ...]:
    """One for each axis, from where to where."""
    given = () if key is Ellipsis else key if isinstance(key, tuple) else (key,)
    given += (slice(None),) * (len(shape) - len(given))
    return tuple(slice(*each.indices(size)[:2]) for each, size in zip(given, shape, strict=True))
