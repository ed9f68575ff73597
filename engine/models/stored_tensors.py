"""Tensors of a checkpoint's files: shape, dtype and slices, which are read only when they are indexed. The class here
joins several arrays; handles of safetensors have the same interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

# Names of dtypes in numpy -> in safetensors
SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "uint8": "U8"}


class StoredTensor(Protocol):
    """A tensor in a checkpoint's file. Indexing reads a part of it."""

    def get_dtype(self) -> str: ...  # in the spelling of safetensors
    def get_shape(self) -> list[int]: ...
    def __getitem__(self, key: Any) -> np.ndarray: ...  # a slice, a tuple of slices, or Ellipsis for all of it


@dataclass(frozen=True, eq=False)
class ConcatenatedTensor:
    """Concatenation of arrays along an axis. The parts may be any objects with a shape, a dtype and slices."""

    parts: tuple[Any, ...]
    axis: int = 0

    def get_dtype(self) -> str:
        return SAFETENSORS_DTYPES[self.parts[0].dtype.name]

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
    """Return one slice with start and stop for each axis of `shape`, for a key that may omit axes."""
    given = () if key is Ellipsis else key if isinstance(key, tuple) else (key,)
    given += (slice(None),) * (len(shape) - len(given))
    return tuple(slice(*each.indices(size)[:2]) for each, size in zip(given, shape, strict=True))
