"""Reads model.pdiparams: the parameters one after another, in the order of their sorted names, which it lacks.

A record is: u32 version, u64 number of LoD levels (always 0 here), u32 version, i32 length of a TensorDesc message,
the message (1: element type, 2: each dimension), the elements. Nothing is aligned.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

import numpy as np

from engine.dtypes import held_as
from engine.graph.nodes import Graph, GraphError, Value

ELEMENT_TYPES = {  # Paddle's VarType
    0: "bool",
    2: "int32",
    3: "int64",
    4: "float16",
    5: "float32",
    20: "uint8",
    21: "int8",
    22: "bfloat16",
}
RECORD_HEADER = struct.Struct("<IQIi")


def read_params(path: Path, graph: Graph) -> dict[str, np.ndarray]:
    """Read-only views of the mapped file by name; bfloat16 as uint16. Checked against what the graph declares."""
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise GraphError(f"{path} is missing") from None
    except ValueError:
        raise GraphError(f"{path} is empty") from None
    params = {}
    offset = 0
    for name in sorted(graph.parameters):
        try:
            params[name], offset = _read_record(buffer, offset, graph.parameters[name])
        except GraphError as error:
            raise GraphError(f"{path}: parameter {name}: {error}") from None
    if offset != len(buffer):
        raise GraphError(f"{path} has {len(buffer)} bytes, the graph's parameters end at {offset}")
    return params


def _read_record(buffer: mmap.mmap, offset: int, expected: Value) -> tuple[np.ndarray, int]:
    start = offset + RECORD_HEADER.size
    if start > len(buffer):
        raise GraphError(f"the file is cut off: {len(buffer)} bytes, its header should end at {start}")
    version, num_lod_levels, tensor_version, message_len = RECORD_HEADER.unpack_from(buffer, offset)
    if (version, num_lod_levels, tensor_version) != (0, 0, 0) or not 0 < message_len < 1024:
        raise GraphError(f"no tensor begins at byte {offset}")
    element_type, shape = _read_tensor_desc(buffer[start : start + message_len])
    if element_type not in ELEMENT_TYPES:
        raise GraphError(f"element type {element_type} is unknown")
    dtype = ELEMENT_TYPES[element_type]
    if (dtype, shape) != (expected.dtype, expected.shape):
        raise GraphError(f"is {dtype} {list(shape)}, the graph expects {expected.dtype} {list(expected.shape)}")
    begin = start + message_len
    end = begin + math.prod(shape) * held_as(dtype).itemsize
    if end > len(buffer):
        raise GraphError(f"the file is cut off: {len(buffer)} bytes, the parameter should end at {end}")
    return np.ndarray(shape, held_as(dtype), buffer, begin), end


def _read_tensor_desc(message: bytes) -> tuple[int, tuple[int, ...]]:
    """Element type and shape, from the protocol buffer's fields 1 and 2, both varints."""
    element_type, shape, position = -1, [], 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        value, position = _read_varint(message, position)
        if tag == 1 << 3:
            element_type = value
        elif tag == 2 << 3:
            shape.append(value)
        else:
            raise GraphError(f"its description has the unknown field {tag >> 3}")
    return element_type, tuple(shape)


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(message):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise GraphError("its description is cut off")
