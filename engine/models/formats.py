"""How a matrix of weights is stored in a graph, and which op multiplies with it. Knows neither checkpoints nor models.

To add one: a class like `Dense` and its line in FORMATS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from engine.dtypes import CODES_PER_SCALE, SMALL_GROUP, WEIGHT_DTYPES, to_bf16
from engine.models.quantize import Codes, to_fp8, to_int4, to_int8


class Format(Protocol):
    """One matrix [N, K] becomes one or several parameters of the graph."""

    @property
    def name(self) -> str:
        """In the manifest."""
        ...

    @property
    def read_as(self) -> str:
        """The dtype that `store` wants the checkpoint's numbers in."""
        ...

    def parameters(self, name: str) -> tuple[str, ...]:
        """The names of what is stored of the weight `name`."""
        ...

    def store(self, matrix: np.ndarray) -> tuple[np.ndarray, ...]:
        """Their values, of a rank's share of the matrix."""
        ...

    def adopt(self, codes: Codes) -> tuple[np.ndarray, ...]:
        """Their values, of a matrix that the checkpoint has quantized."""
        ...

    def linear(self, ops: Any, x: Any, stored: Sequence[Any], bias: Any | None) -> Any:
        """x [T, K] times the matrix: [T, N]."""
        ...


@dataclass(frozen=True)
class Dense:
    """One number an element. Norms, biases and tables are stored like this whatever the format of the matrices."""

    name: str

    @property
    def read_as(self) -> str:
        return self.name

    def parameters(self, name: str) -> tuple[str, ...]:
        return (name,)

    def store(self, matrix: np.ndarray) -> tuple[np.ndarray, ...]:
        return (matrix,)

    def adopt(self, codes: Codes) -> tuple[np.ndarray, ...]:
        return (codes.values().astype(self.name),)

    def linear(self, ops: Any, x: Any, stored: Sequence[Any], bias: Any | None) -> Any:
        return ops.linear(x, *stored, bias)


@dataclass(frozen=True)
class Int8:
    """A byte an element and a scale a row. The activations are rounded to bf16 or, by `linear_a8w8`, to bytes too."""

    name: str
    op: str
    read_as = "float32"

    def parameters(self, name: str) -> tuple[str, ...]:
        return (name, f"{name}_scale")

    def store(self, matrix: np.ndarray) -> tuple[np.ndarray, ...]:
        return to_int8(matrix)

    def adopt(self, codes: Codes) -> tuple[np.ndarray, ...]:
        if codes.codes.dtype == np.int8 and codes.scale.shape[1] == 1:
            return codes.codes, codes.scale[:, 0]
        return to_int8(codes.values())

    def linear(self, ops: Any, x: Any, stored: Sequence[Any], bias: Any | None) -> Any:
        return getattr(ops, self.op)(x, *stored, bias)


@dataclass(frozen=True)
class Int4:
    """Half a byte an element and a scale a group in a row, and the group's zero where a checkpoint has one."""

    name: str
    group: int = CODES_PER_SCALE
    has_zero: bool = False
    read_as = "float32"

    def parameters(self, name: str) -> tuple[str, ...]:
        return (name, f"{name}_scale", f"{name}_zero")[: 2 + self.has_zero]

    def store(self, matrix: np.ndarray) -> tuple[np.ndarray, ...]:
        codes, scale = to_int4(matrix, self.group)
        return (codes, scale, to_bf16(np.full(scale.shape, 8, np.float32)))[: 2 + self.has_zero]

    def adopt(self, codes: Codes) -> tuple[np.ndarray, ...]:
        if codes.codes.dtype == np.uint8:
            return codes.as_int4(self.has_zero, self.group)
        return self.store(codes.values())

    def linear(self, ops: Any, x: Any, stored: Sequence[Any], bias: Any | None) -> Any:
        weight, scale, *zero = stored
        return ops.linear_int4(x, weight, scale, zero[0] if zero else None, bias)


@dataclass(frozen=True)
class Fp8:
    """A byte an element, a float (e4m3), and a scale a row, or of checkpoints that have it, one for 128 elements."""

    name: str
    read_as = "float32"

    def parameters(self, name: str) -> tuple[str, ...]:
        return (name, f"{name}_scale")

    def store(self, matrix: np.ndarray) -> tuple[np.ndarray, ...]:
        return to_fp8(matrix)

    def adopt(self, codes: Codes) -> tuple[np.ndarray, ...]:
        return self.store(codes.values())

    def linear(self, ops: Any, x: Any, stored: Sequence[Any], bias: Any | None) -> Any:
        return ops.linear_fp8(x, *stored, bias)


FLOAT32: Format = Dense("float32")
WEIGHT_ONLY_INT8: Format = Int8("weight_only_int8", "linear_int8")
QUANTIZED: dict[str, Format] = {
    "weight_only_int8": WEIGHT_ONLY_INT8,
    "weight_only_int4": Int4("weight_only_int4"),
    "weight_only_int4_g32": Int4("weight_only_int4_g32", SMALL_GROUP),
    "a8w8": Int8("a8w8", "linear_a8w8"),
    "weight_only_fp8": Fp8("weight_only_fp8"),
}
FORMATS: dict[str, Format] = {name: Dense(name) for name in WEIGHT_DTYPES} | QUANTIZED


def with_zero(format: Format) -> Format:
    return replace(format, has_zero=True) if isinstance(format, Int4) else format


def head_format(format: Format, dtype: str) -> Format:
    """Of the matrix that makes the logits: 8 bits where the others have fewer, as errors there are seen at once, and
    the dtype of tables beside 8-bit floats, whose makers leave it so."""
    if isinstance(format, Fp8):
        return FORMATS[dtype]
    return WEIGHT_ONLY_INT8 if format.name in QUANTIZED else format
