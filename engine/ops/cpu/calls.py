"""Calls of the catalogue's ops by the C library: how arrays and attributes are handed to it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.ops.catalogue import CPU_OPS, OPS
from engine.ops.cpu.library import CallHead, CArray, c_library
from engine.ops.declaration import TYPES, Op

# In the order of TYPES. They are found by themselves, as making the name of a dtype takes longer than a small op.
DTYPES = [np.dtype(name) for name in ("float32", "uint16", "float16", "int8", "uint8", "int32")]
TYPE_OF = {dtype: number for number, dtype in enumerate(DTYPES)}
NUMBER = {op.name: number for number, op in enumerate(CPU_OPS)}  # an LlmOp
NOT_GIVEN = CArray(rank=-1)
MAX_RANK = len(NOT_GIVEN.shape)
assert len(DTYPES) == len(TYPES)


class ArgumentError(ValueError):
    """An op was called with an array of the wrong shape or dtype."""


class Packed(np.ndarray):
    """A weight in the order that its op reads fastest, in the shape that it had."""


class Operand(NamedTuple):
    """An array of a call, or what is known of it: -1 is a size that differs from step to step."""

    address: int | None
    dtype: np.dtype
    shape: tuple[int, ...]
    is_packed: bool = False


class Call:
    """A call of an op with its arrays, inputs before outputs, and its attributes. Raises ArgumentError for attributes
    that are not the op's."""

    def __init__(self, op: Op, inputs: Sequence[Operand | None], attributes: Mapping[str, Any]):
        names = [each.name for each in op.attributes]
        if attributes.keys() != set(names) or len(inputs) > len(op.inputs):
            raise TypeError(
                f"{op.name}: attributes are {', '.join(names)}, not {', '.join(attributes)};"
                f" inputs are {', '.join(each.name for each in op.inputs)}"
            )
        self.op, self.number = op, NUMBER[op.name]
        self._attributes = (ctypes.c_double * len(names))(*[attributes[name] for name in names])
        self._arrays = (CArray * (len(op.inputs) + len(op.outputs)))()
        for index, declared in enumerate(op.inputs):
            operand = inputs[index] if index < len(inputs) else None
            if operand is None and not declared.is_optional:
                raise ArgumentError(f"{op.name}: {declared.name} is missing")
            self._set(index, operand)

    def shapes(self) -> list[tuple[int, ...]]:
        """Check types and shapes of the inputs; return the shapes of the outputs. Raises ArgumentError."""
        self._must(c_library().llm_shapes(self.number, self._arrays, self._attributes))
        return [tuple(array.shape[: array.rank]) for array in self._arrays[len(self.op.inputs) :]]

    def set_output(self, index: int, address: int) -> None:
        self._arrays[len(self.op.inputs) + index].data = address

    def check(self) -> None:
        """Check conditions on sizes and the values of ids. Raises ArgumentError."""
        self._must(c_library().llm_check(self.number, self._arrays, self._attributes))

    def run(self, table: Any) -> bytes | None:
        """Return what went wrong between ranks. `table`: the kernels of an instruction set."""
        return c_library().llm_call(table, self.number, self._arrays, self._attributes)

    def record(self, of_logits: bool) -> bytes:
        """Return the call as `llm_run` reads it. Raises ArgumentError."""
        head = CallHead(self.number, of_logits)
        c_library().llm_record(head, self._arrays, self._attributes, None)
        record = ctypes.create_string_buffer(head.num_bytes)
        self._must(c_library().llm_record(head, self._arrays, self._attributes, record))
        return record.raw

    def _set(self, index: int, operand: Operand | None) -> None:
        if operand is None:
            self._arrays[index] = NOT_GIVEN
            return
        address, dtype, shape, is_packed = operand
        if (type_number := TYPE_OF.get(dtype)) is None or len(shape) > MAX_RANK:
            name = self.op.inputs[index].name
            raise ArgumentError(f"{self.op.name}: {name} is {dtype} {list(shape)}, which no op takes")
        self._arrays[index] = CArray(address, type_number, len(shape), is_packed, shape)

    @staticmethod
    def _must(trouble: bytes | None) -> None:
        if trouble:
            raise ArgumentError(trouble.decode())


def operand_of(op: str, name: str, array: np.ndarray | None) -> Operand | None:
    """Return the operand of an array. Raises ArgumentError if the array is not dense."""
    if array is None:
        return None
    if not array.flags.c_contiguous:
        raise ArgumentError(f"{op}: {name} must be dense and row-major")
    return Operand(array.ctypes.data, array.dtype, array.shape, isinstance(array, Packed))


def call_of(
    op: str, inputs: Sequence[np.ndarray | None], attributes: Mapping[str, Any]
) -> tuple[Call, list[np.ndarray]]:
    """Return a checked call and its outputs, which hold no values yet. The last may be an input, updated in place."""
    declared = OPS[op]
    named = zip([each.name for each in declared.inputs], inputs, strict=False)
    call = Call(declared, [operand_of(op, name, array) for name, array in named], attributes)
    shapes, outputs = call.shapes(), []
    for index, shape in enumerate(shapes):
        is_updated = declared.updated is not None and index == len(shapes) - 1
        dtype = DTYPES[TYPES.index(declared.outputs[index].types[0])]
        array = inputs[declared.updated or 0] if is_updated else np.empty(shape, dtype)
        assert array is not None
        outputs.append(array)
        call.set_output(index, array.ctypes.data)
    call.check()
    return call, outputs
