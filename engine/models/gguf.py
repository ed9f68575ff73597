"""Reads GGUF files: their metadata, and their tensors as floats or as codes. Independent of families of models.

It is a reader of its own, since the `gguf` package would bring four more packages for what 150 lines do.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from engine.models.config_fields import ModelError
from engine.models.gguf_blocks import BLOCK_FORMATS, BlockFormat, Decoded
from engine.models.quantize import Codes
from engine.models.stored_tensors import slices

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # for struct
STRING, ARRAY = 8, 9
LONGEST = 1 << 30  # bytes of a string and elements of an array; more means that the file is damaged
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """A tensor of plain floats. `raw` are the bytes of its rows; a vector has one row.

    A tensor of three axes, which are the matrices of all experts, cannot be read as a whole.
    """

    name: str
    kind: BlockFormat
    raw: np.ndarray  # u8 [N, bytes of a row]
    shape: tuple[int, ...]
    order: np.ndarray | None = None  # rows of `raw`, or elements of a vector, in the model's order; None: as they are
    offset: float = 0.0  # added to the values of a vector

    def get_dtype(self) -> str:
        return self.kind.name

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, key: Any) -> np.ndarray:
        first, *others = slices(key, self.shape)
        if len(self.shape) == 1:
            values = self._values(self.raw)[0] + np.float32(self.offset)
            return (values if self.order is None else values[self.order])[first]
        return self._values(self._rows(first))[:, others[0]]

    def _rows(self, rows: slice) -> np.ndarray:
        return self.raw[rows] if self.order is None else self.raw[self.order[rows]]

    def _values(self, raw: np.ndarray) -> np.ndarray:
        return raw.view(DTYPES[self.kind.name])


@dataclass(frozen=True, eq=False)
class GgufCodes(GgufTensor):
    """A quantized matrix, which reads as float32 or as its codes."""

    def get_dtype(self) -> str:
        return "BF16"  # not F32, which would make tables of embeddings larger than they need to be

    @property
    def format(self) -> str:
        return self.kind.format

    @property
    def has_zero(self) -> bool:
        return self.kind.has_zero

    @property
    def inexact(self) -> str:
        return "" if self.kind.is_exact else self.kind.name

    def codes(self) -> Codes:
        rows = self._rows(slice(0, self.shape[0]))
        codes, scale, minimum = (None if each is None else each.reshape(len(rows), -1) for each in self._decode(rows))
        assert codes is not None and scale is not None
        if minimum is None:
            return Codes(codes, scale)
        constant = scale == 0  # such groups have the value -minimum, whatever their codes are
        zero = np.divide(minimum, scale, out=np.ones_like(scale), where=~constant)
        if constant.any():
            codes = np.where(np.repeat(constant, codes.shape[1] // scale.shape[1], axis=1), np.zeros_like(codes), codes)
        return Codes(codes, np.where(constant, minimum, scale), zero)

    def _values(self, raw: np.ndarray) -> np.ndarray:
        codes, scale, minimum = self._decode(raw)
        middle = np.float32(8 if codes.dtype == np.uint8 and minimum is None else 0)
        values = (codes.reshape(*scale.shape, -1).astype(np.float32) - middle) * scale[..., None]
        if minimum is not None:
            values -= minimum[..., None]
        return values.reshape(len(raw), self.shape[-1])

    def _decode(self, raw: np.ndarray) -> Decoded:
        assert self.kind.decode
        return self.kind.decode(raw.reshape(-1, self.kind.num_bytes))


@dataclass(frozen=True, eq=False)
class Gguf:
    """Metadata and tensors of a GGUF file by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Gguf:
        """Parse a file and map its tensors into memory. Raises ModelError."""
        with path.open("rb") as file:
            try:
                return _read(file, path)
            except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
                raise ModelError(f"{path} is cut off or damaged: {error}") from None


def _read(file: BinaryIO, path: Path) -> Gguf:
    if file.read(4) != MAGIC:
        raise ModelError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}")
    version, num_tensors, num_keys = _unpack(file, "IQQ")
    if version not in VERSIONS:
        raise ModelError(f"{path} has GGUF version {version}, supported are {', '.join(map(str, VERSIONS))}")
    metadata = {}
    for _ in range(num_keys):
        key = _string(file)
        metadata[key] = _value(file, _unpack(file, "I")[0])
    infos = [_info(file) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", ALIGNMENT))
    start = -(-file.tell() // alignment) * alignment
    return Gguf(metadata, {name: _tensor(path, start, (name, *info)) for name, *info in infos})


def _info(file: BinaryIO) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape, type and offset of a tensor. The file has the fastest axis first."""
    name, num_axes = _string(file), _unpack(file, "I")[0]
    shape = tuple(reversed(_unpack(file, f"{num_axes}Q")))
    kind, offset = _unpack(file, "IQ")
    return name, shape, kind, offset


def _tensor(path: Path, start: int, info: Sequence[Any]) -> GgufTensor:
    name, shape, number, offset = info
    if number not in BLOCK_FORMATS:
        known = ", ".join(kind.name for kind in BLOCK_FORMATS.values())
        raise ModelError(f"{path}: tensor {name} has type {number}, supported are {known}")
    kind = BLOCK_FORMATS[number]
    if len(shape) not in (1, 2, 3) or shape[-1] % kind.size:
        raise ModelError(f"{path}: tensor {name} has shape {shape}, which is no matrix of blocks of {kind.size}")
    row_bytes = shape[-1] // kind.size * kind.num_bytes
    raw = np.memmap(path, np.uint8, "r", start + offset, (math.prod(shape[:-1]), row_bytes))
    return (GgufCodes if kind.decode else GgufTensor)(name, kind, raw, shape)


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{layout}", file.read(struct.calcsize(f"<{layout}")))


def _string(file: BinaryIO) -> str:
    [size] = _unpack(file, "Q")
    if size > LONGEST:
        raise ValueError(f"a string has {size} bytes")
    data = file.read(size)
    if len(data) < size:
        raise ValueError("it ends inside of a string")
    return data.decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(file)
    if kind != ARRAY:
        if kind not in SCALARS:
            raise ValueError(f"a value has type {kind}")
        return _unpack(file, SCALARS[kind])[0]
    item, count = _unpack(file, "IQ")
    if count > LONGEST:
        raise ValueError(f"an array has {count} elements")
    if item in SCALARS:
        return list(_unpack(file, f"{count}{SCALARS[item]}"))
    return [_value(file, item) for _ in range(count)]
