"""Formats of weight matrices in a graph, and the ops that multiply by them. Independent of checkpoints and models.

To add a format, write a class like `Dense` and add a line to FORMATS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from engine.dtypes import CODES_PER_SCALE, FP8_BLOCK, SMALL_GROUP, WEIGHT_DTYPES, to_bf16
from engine.models.quantize import Codes, to_block_fp8, to_fp8, to_int4, to_int8, to_mxfp4


class Format(Protocol):
    """Storage of a matrix [N, K] as one or several parameters of the graph."""

    @property
    def name(self) -> str:
        """Return the format's name in the manifest."""
        ...

    @property
    def read_as(self) -> str:
        """Return the dtype of the matrices that `store` takes."""
        ...

    def parameters(self, name: str) -> tuple[str, ...]:
        """Return the names of the parameters that store the weight `name`."""
        ...

    def store(self, matrix: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the values of these parameters for a rank's share [N, K] of the matrix."""
        ...

    def store_codes(self, codes: Codes) -> tuple[np.ndarray, ...]:
        """Return the values of these parameters for a matrix that the checkpoint stores quantized."""
        ...

    def linear(self, ops: Any, x: Any, stored: Sequence[Any], bias: Any | None) -> Any:
        """Return the product [T, N] of `x` [T, K] and the matrix, plus the bias [N] if there is one."""
        ...

    def experts(self, ops: Any, op: str, inputs: Sequence[Any], stored: Sequence[Any], **attributes: float) -> Any:
        """Return what `expert_gate_up` or `expert_down` computes from `inputs` with the stacked matrices of experts.

        `stored` ends with their biases, or None.
        """
        ...


@dataclass(frozen=True)
class Dense:
    """One float per element. Norms, biases and tables have this format, whatever the format of the matrices is."""

    name: str
    dtype: str = ""  # of the elements; empty: the name
    of_experts: Format | None = None  # the format of experts; None: this one

    @property
    def read_as(self) -> str:
        return self.dtype or self.name

    def parameters(self, name: str) -> tuple[str, ...]:
        return (name,)

    def store(self, matrix: np.ndarray) -> tuple[np.ndarray, ...]:
        return (matrix,)

    def store_codes(self, codes: Codes) -> tuple[np.ndarray, ...]:
        return (codes.values().astype(self.read_as),)

    def linear(self, ops: Any, x: Any, stored: Sequence[Any], bias: Any | None) -> Any:
        return ops.linear(x, *stored, bias)

    def experts(self, ops: Any, op: str, inputs: Sequence[Any], stored: Sequence[Any], **attributes: float) -> Any:
        return getattr(ops, op)(*inputs, *stored, **attributes)


@dataclass(frozen=True)
class Int8:
    """One byte per element and one scale per row. Activations are rounded to 8 bits, in groups or, by the ops with the
    suffix _a8w8, a row at a time."""

    name: str
    suffix: str  # of the ops that multiply with it
    read_as = "float32"

    def parameters(self, name: str) -> tuple[str, ...]:
        return (name, f"{name}_scale")

    def store(self, matrix: np.ndarray) -> tuple[np.ndarray, ...]:
        return to_int8(matrix)

    def store_codes(self, codes: Codes) -> tuple[np.ndarray, ...]:
        one = codes.scale.shape[1] == 1 and codes.group_of is None
        if codes.codes.dtype == np.int8 and one and (codes.zero is None or not codes.zero.any()):
            return codes.codes, codes.scale[:, 0]
        return to_int8(codes.values())

    def linear(self, ops: Any, x: Any, stored: Sequence[Any], bias: Any | None) -> Any:
        return getattr(ops, f"linear{self.suffix}")(x, *stored, bias)

    def experts(self, ops: Any, op: str, inputs: Sequence[Any], stored: Sequence[Any], **attributes: float) -> Any:
        return getattr(ops, f"{op}{self.suffix}")(*inputs, *stored, **attributes)


@dataclass(frozen=True)
class Int4:
    """Four bits per element, and for each group of a row a scale and, if the checkpoint has them, a zero point."""

    name: str
    group: int = CODES_PER_SCALE
    has_zero: bool = False
    read_as = "float32"

    def parameters(self, name: str) -> tuple[str, ...]:
        return (name, f"{name}_scale", f"{name}_zero")[: 2 + self.has_zero]

    def store(self, matrix: np.ndarray) -> tuple[np.ndarray, ...]:
        codes, scale = to_int4(matrix, self.group)
        return (codes, scale, to_bf16(np.full(scale.shape, 8, np.float32)))[: 2 + self.has_zero]

    def store_codes(self, codes: Codes) -> tuple[np.ndarray, ...]:
        if codes.fits_int4(self.has_zero, self.group):
            return codes.as_int4(self.has_zero, self.group)
        return self.store(codes.values())

    def linear(self, ops: Any, x: Any, stored: Sequence[Any], bias: Any | None) -> Any:
        return ops.linear_int4(x, *self._inputs(stored), bias)

    def experts(self, ops: Any, op: str, inputs: Sequence[Any], stored: Sequence[Any], **attributes: float) -> Any:
        *matrices, bias = stored
        return getattr(ops, f"{op}_int4")(*inputs, *self._inputs(matrices), bias, **attributes)

    def _inputs(self, stored: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Return the codes, the scales, and the zero points or None."""
        codes, scale, *zero = stored
        return codes, scale, zero[0] if zero else None


@dataclass(frozen=True)
class Fp8:
    """An 8-bit float (e4m3) per element, and one scale per row, or per 128 elements of a row.

    A matrix of 8-bit floats keeps the scales of the checkpoint. Activations are rounded to bf16, or to 8-bit floats by
    `linear_a8w8_fp8`.
    """

    name: str
    op: str
    block_rows: int = 1  # rows of a quantized matrix that share scales: 1, or 128 with a scale per 128 x 128 elements
    of_experts: Format | None = None  # the format of experts, and of MLPs in a model without experts; None: this one
    read_as = "float32"

    def parameters(self, name: str) -> tuple[str, ...]:
        return (name, f"{name}_scale")

    def store(self, matrix: np.ndarray) -> tuple[np.ndarray, ...]:
        return to_fp8(matrix) if self.block_rows == 1 else to_block_fp8(matrix)

    def store_codes(self, codes: Codes) -> tuple[np.ndarray, ...]:
        return self.store(codes.values())

    def linear(self, ops: Any, x: Any, stored: Sequence[Any], bias: Any | None) -> Any:
        return getattr(ops, self.op)(x, *stored, bias)

    def experts(self, ops: Any, op: str, inputs: Sequence[Any], stored: Sequence[Any], **attributes: float) -> Any:
        return getattr(ops, f"{op}_fp8")(*inputs, *stored, **attributes)


@dataclass(frozen=True)
class Mxfp4Experts:
    """A 4-bit float (e2m1) per element, and a power of two for each 32 elements of a row. Only experts have it.

    Matrices that a checkpoint stores so keep their values.
    """

    name: str
    read_as = "float32"

    def parameters(self, name: str) -> tuple[str, ...]:
        return (name, f"{name}_scale")

    def store(self, matrix: np.ndarray) -> tuple[np.ndarray, ...]:
        return to_mxfp4(matrix)

    def store_codes(self, codes: Codes) -> tuple[np.ndarray, ...]:
        return self.store(codes.values())

    def linear(self, ops: Any, x: Any, stored: Sequence[Any], bias: Any | None) -> Any:
        raise TypeError("only matrices of experts have this format")

    def experts(self, ops: Any, op: str, inputs: Sequence[Any], stored: Sequence[Any], **attributes: float) -> Any:
        return getattr(ops, f"{op}_mxfp4")(*inputs, *stored, **attributes)


FLOAT32: Format = Dense("float32")
WEIGHT_ONLY_INT8: Format = Int8("weight_only_int8", "_int8")
QUANTIZED: dict[str, Format] = {
    "weight_only_int8": WEIGHT_ONLY_INT8,
    "weight_only_int4": Int4("weight_only_int4"),
    "weight_only_int4_g32": Int4("weight_only_int4_g32", SMALL_GROUP),
    "a8w8": Int8("a8w8", "_a8w8"),
    "weight_only_fp8": Fp8("weight_only_fp8", "linear_fp8"),
    "a8w8_fp8": Fp8("a8w8_fp8", "linear_a8w8_fp8"),
    "block_wise_fp8": Fp8("block_wise_fp8", "linear_a8w8_fp8", FP8_BLOCK),
    "a8w8_fp8_wint4": Fp8("a8w8_fp8_wint4", "linear_a8w8_fp8", of_experts=Int4("weight_only_int4")),
    "mxfp4": Dense("mxfp4", of_experts=Mxfp4Experts("mxfp4")),
}
FORMATS: dict[str, Format] = {name: Dense(name) for name in WEIGHT_DTYPES} | QUANTIZED


def format_of(name: str, dtype: str) -> Format:
    """Return the format of this name in a model with tables of this dtype."""
    format = FORMATS[name]
    return replace(format, dtype=dtype) if isinstance(format, Dense) and format.of_experts else format


def with_zero(format: Format) -> Format:
    """Return the format with zero points, if it is a 4-bit format, else the format as it is."""
    return replace(format, has_zero=True) if isinstance(format, Int4) else format


def common_format(formats: Sequence[Format]) -> Format:
    """Return the format of a matrix whose parts would have these formats: the one with the most bits per weight."""
    narrow = [format for format in formats if isinstance(format, Int4)]
    if len(narrow) < len(formats):
        return max(formats, key=lambda format: _BITS.get(type(format), 0))
    finest = min(narrow, key=lambda format: format.group)
    return replace(finest, has_zero=any(format.has_zero for format in narrow))


_BITS: dict[type, int] = {Dense: 16, Fp8: 9, Int8: 8, Int4: 4}


def expert_format(format: Format) -> Format:
    """Return the format of the experts' matrices, or of the MLPs of a model without experts, when the other matrices
    have `format`."""
    return getattr(format, "of_experts", None) or format


def without_cache(quant_type: str) -> tuple[str, bool]:
    """Return a name of PaddleNLP without its `c8`, and whether it had that, which stands for an 8-bit KV cache."""
    before, found, behind = quant_type.partition("c8")
    return before + behind, bool(found)


def head_format(format: Format, dtype: str) -> Format:
    """Return the format of the matrix that computes the logits, when the other matrices have `format`.

    With integers of 8 or 4 bits it is 8-bit integers, since errors of the logits are directly visible. With 8-bit
    floats, or 4-bit floats for experts, it is the dtype of tables, as in such checkpoints.
    """
    if isinstance(format, Fp8 | Dense):
        return FORMATS[dtype]
    return WEIGHT_ONLY_INT8 if format.name in QUANTIZED else format
