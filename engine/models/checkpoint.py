"""Reads the tensors of a Hugging Face checkpoint one at a time, out of mapped safetensors files. Knows no model.

Not with the library of that name: into numpy it reads no bfloat16.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.dtypes import held_as, to_bf16
from engine.models.keys import ModelError, read_json
from engine.models.weights import Part, Weight

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
CONVERTED_AT_ONCE = 1 << 22  # elements; bounds what conversion needs beside the tensor itself


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    buffer: mmap.mmap
    offset: int
    end: int


class Checkpoint:
    """The tensors of a checkpoint directory by name."""

    def __init__(self, directory: Path):
        self._stored: dict[str, Stored] = {}
        for path in weight_files(directory):
            self._stored.update(_read_header(path))
        self._unread = set(self._stored)

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._stored

    def are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors are stored as the same numbers."""
        a, b = self._find(one), self._find(other)
        if (a.dtype, a.shape, a.end - a.offset) != (b.dtype, b.shape, b.end - b.offset):
            return False
        bytes_of_a, bytes_of_b = (np.frombuffer(t.buffer, np.uint8, t.end - t.offset, t.offset) for t in (a, b))
        steps = range(0, len(bytes_of_a), CONVERTED_AT_ONCE)
        return all(
            np.array_equal(bytes_of_a[i : i + CONVERTED_AT_ONCE], bytes_of_b[i : i + CONVERTED_AT_ONCE]) for i in steps
        )

    def graph_dtype(self, tensor: str) -> str:
        """What `auto` makes of a tensor's dtype: float32 stays, the 16-bit ones become bfloat16."""
        return "float32" if self._find(tensor).dtype == "F32" else "bfloat16"

    def read(self, weight: Weight, dtype: str, rank: int = 0, num_ranks: int = 1) -> np.ndarray:
        """A rank's share of a parameter: float32, or bfloat16 as uint16 when `dtype` says so and it is a matrix."""
        result = np.empty(weight.rank_shape(num_ranks), held_as(dtype if weight.is_matrix else "float32"))
        row = 0
        for part in weight.parts:
            share = self._share(part, rank, num_ranks)
            rows = result[row : row + len(share)]
            _convert(share, self._find(part.tensor).dtype, rows)
            row += len(share)
        return result

    def refuse_unread(self, ignored: set[str]) -> None:
        """A tensor nobody asked for is a part of the model that would be left out without a word."""
        left = sorted(name for name in self._unread - ignored if not name.endswith("rotary_emb.inv_freq"))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(f"the checkpoint has tensor {left[0]}{more}, for which this model type has no place")

    def _share(self, part: Part, rank: int, num_ranks: int) -> np.ndarray:
        stored = self._find(part.tensor)
        if stored.shape != part.shape:
            raise ModelError(f"tensor {part.tensor} has shape {stored.shape}, config.json asks for {part.shape}")
        if stored.dtype not in DTYPES:
            raise ModelError(f"tensor {part.tensor} has dtype {stored.dtype}, supported are {', '.join(DTYPES)}")
        dtype = held_as(DTYPES[stored.dtype])
        num_bytes = math.prod(stored.shape) * dtype.itemsize
        if stored.end - stored.offset != num_bytes:
            raise ModelError(
                f"tensor {part.tensor} has {stored.end - stored.offset} bytes, its shape asks for {num_bytes}"
            )
        self._unread.discard(part.tensor)
        tensor = np.ndarray(stored.shape, dtype, stored.buffer, stored.offset)
        if part.cut_axis is None:
            return tensor
        return np.split(tensor, num_ranks, axis=part.cut_axis)[rank]

    def _find(self, tensor: str) -> Stored:
        if tensor not in self._stored:
            raise ModelError(f"tensor {tensor} is missing in the checkpoint")
        return self._stored[tensor]


def weight_files(directory: Path) -> list[Path]:
    """model.safetensors, or the files its index names."""
    index_path = directory / "model.safetensors.index.json"
    if index_path.exists():
        names = sorted(set(read_json(index_path).get("weight_map", {}).values()))
        paths = [directory / name for name in names]
    else:
        paths = [directory / "model.safetensors"]
    for path in paths:
        if not path.exists():
            raise ModelError(f"{path} is missing; weights are read from model.safetensors or its shards")
    if not paths:
        raise ModelError(f"{index_path} names no files: weight_map is missing or empty")
    return paths


def _read_header(path: Path) -> dict[str, Stored]:
    """A safetensors file: the header's length in 8 bytes, the header as JSON, the tensors."""
    size = path.stat().st_size
    if size < 8:
        raise ModelError(f"{path} has {size} bytes, too few for a safetensors file")
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(buffer[:8], "little")
    if start > size:
        raise ModelError(f"{path} is cut off: its header should end at byte {start}, the file has {size}")
    try:
        header = json.loads(buffer[8:start])
        entries = {name: _stored(entry, buffer, start) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} has a header that is not safetensors: {error!r}") from None
    for name, stored in entries.items():
        if stored.end > size:
            raise ModelError(f"{path} is cut off: tensor {name} should end at byte {stored.end}, the file has {size}")
    return entries


def _stored(entry: Mapping[str, Any], buffer: mmap.mmap, start: int) -> Stored:
    begin, end = entry["data_offsets"]
    return Stored(entry["dtype"], tuple(entry["shape"]), buffer, start + begin, start + end)


def _convert(source: np.ndarray, dtype: str, target: np.ndarray) -> None:
    """Fills `target`, float32 or bfloat16 bits, from a tensor as it is stored. Rounds to nearest, ties to even."""
    rows_at_once = max(1, CONVERTED_AT_ONCE // max(1, source[:1].size))
    for row in range(0, len(source), rows_at_once):
        some, out = source[row : row + rows_at_once], target[row : row + rows_at_once]
        if dtype == "BF16" and out.dtype == np.float32:
            np.left_shift(some, 16, out=out.view(np.uint32), dtype=np.uint32)
        elif dtype != "BF16" and out.dtype == np.uint16:
            out[...] = to_bf16(some)
        else:
            out[...] = some
