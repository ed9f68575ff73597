"""Reads what Paddle writes, without Paddle: the tensors of a .pdiparams file, which it writes too, and what a saved
program (.json or, of Paddle 2, .pdmodel) says of its parameters and ops. Independent of the graphs of this server.

A .pdiparams file holds the parameters one after another, in the order of their sorted names, which it lacks. A record
is: u32 version, u64 number of LoD levels (always 0 here), u32 version, i32 length of a TensorDesc message, the message
(1: element type, 2: each dimension), the elements. Nothing is aligned.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - lets numpy know bfloat16
import numpy as np

from engine.errors import SetupError
from engine.protobuf import fields

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
DENSE_TENSOR = 7  # a VarType, too


class PaddleFileError(SetupError):
    """A file is missing, cut off or not what Paddle writes."""


@dataclass(frozen=True)
class Program:
    """Content of a program that can be read without knowing its ops."""

    parameters: tuple[str, ...]  # all that its .pdiparams holds
    ops: tuple[tuple[str, dict[str, Any]], ...]  # by its name, with those attributes that are numbers or texts


def read_params(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name, as read-only views of the mapped file."""
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise PaddleFileError(f"{path} is missing") from None
    except ValueError:
        raise PaddleFileError(f"{path} is empty") from None
    params, offset = {}, 0
    for name in sorted(names):
        try:
            params[name], offset = _read_record(buffer, offset)
        except (PaddleFileError, ValueError) as error:
            raise PaddleFileError(f"{path}: parameter {name}: {error}") from None
    if offset != len(buffer):
        raise PaddleFileError(f"{path} has {len(buffer)} bytes, the graph's parameters end at {offset}")
    return params


def release(array: np.ndarray) -> None:
    """Remove the pages of an array of `read_params` from the memory of this process. They are read again when they are
    accessed. Other arrays are left alone: only those of mapped files are read-only views of an mmap."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if array.flags.writeable or not isinstance(base, mmap.mmap):
        return
    offset = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    if (length := offset + array.nbytes - start) >= mmap.PAGESIZE:
        base.madvise(mmap.MADV_DONTNEED, start, length // mmap.PAGESIZE * mmap.PAGESIZE)


def write_params(path: Path, params: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write parameters in the order of their names, which `params` must have; uint16 arrays are stored as bfloat16.
    Raises OSError with the path."""
    last = ""
    with path.open("wb") as file:
        for name, array in params:
            assert last < name, f"{name} after {last}: a reader would take one for the other"
            last, stored = name, array.view("bfloat16") if array.dtype == np.uint16 else array
            message = _tensor_desc(stored)
            try:
                file.write(RECORD_HEADER.pack(0, 0, 0, len(message)) + message)
                file.write(np.ascontiguousarray(stored).view(np.uint8).data)
                file.flush()  # else a full disk would be met when the file is closed
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None


def _tensor_desc(array: np.ndarray) -> bytes:
    element_type = {name: number for number, name in ELEMENT_TYPES.items()}[array.dtype.name]
    return b"\x08" + _varint(element_type) + b"".join(b"\x10" + _varint(size) for size in array.shape)


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def _read_record(buffer: mmap.mmap, offset: int) -> tuple[np.ndarray, int]:
    start = offset + RECORD_HEADER.size
    if start > len(buffer):
        raise PaddleFileError(f"the file is cut off: {len(buffer)} bytes, its header should end at {start}")
    version, num_lod_levels, tensor_version, message_len = RECORD_HEADER.unpack_from(buffer, offset)
    if (version, num_lod_levels, tensor_version) != (0, 0, 0) or not 0 < message_len < 1024:
        raise PaddleFileError(f"no tensor begins at byte {offset}")
    element_type, shape = _read_tensor_desc(buffer[start : start + message_len])
    if element_type not in ELEMENT_TYPES:
        raise PaddleFileError(f"element type {element_type} is unknown")
    dtype, begin = np.dtype(ELEMENT_TYPES[element_type]), start + message_len
    end = begin + math.prod(shape) * dtype.itemsize
    if end > len(buffer):
        raise PaddleFileError(f"the file is cut off: {len(buffer)} bytes, the parameter should end at {end}")
    return np.ndarray(shape, dtype, buffer, begin), end


def _read_tensor_desc(message: bytes) -> tuple[int, tuple[int, ...]]:
    element_type, shape = -1, []
    for field, value in fields(message):
        if field == 1:
            element_type = value
        elif field == 2:
            shape.append(value)
        else:
            raise PaddleFileError(f"its description has the unknown field {field}")
    return element_type, tuple(shape)


def read_program(path: Path) -> Program:
    try:
        data = path.read_bytes()
        return _read_json(json.loads(data)) if path.suffix == ".json" else _read_protobuf(data)
    except FileNotFoundError:
        raise PaddleFileError(f"{path} is missing") from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, PaddleFileError) as error:
        raise PaddleFileError(f"{path} is not a program that Paddle has saved: {error!r}") from None


def _read_json(document: dict[str, Any]) -> Program:
    """Read the names of a program in JSON. Paddle 3.0 wrote names in full; later ones are numbers of dialects, and a
    parameter is a `p`."""
    parameters, ops = [], []
    for region in document["program"]["regions"]:
        for op in (op for block in region["blocks"] for op in block["ops"]):
            name = op["#"].rpartition(".")[2]
            if name == "p":
                parameters.append(op["A"][3])
                continue
            attributes = {each["N"]: each["AT"].get("D") for each in op.get("A", ())}
            if name == "parameter":
                parameters.append(attributes["parameter_name"])
            ops.append((name, attributes))
    return Program(tuple(parameters), tuple(ops))


def _read_protobuf(data: bytes) -> Program:
    """Read the names of a ProgramDesc: its blocks are field 1, a block's variables 3 and its ops 4."""
    parameters, ops = [], []
    blocks = [block for field, block in fields(data) if field == 1]
    for field, message in (item for block in blocks for item in fields(block)):
        if field == 3:  # name, type, is it kept
            variable = dict(fields(message))
            if variable.get(3) and dict(fields(variable[2]))[1] == DENSE_TENSOR:
                parameters.append(variable[1].decode())
        elif field == 4:  # 3: name, 4: each attribute, of which 1 is the name and 3 a whole number
            of_op = list(fields(message))
            attributes = [dict(fields(value)) for number, value in of_op if number == 4]
            named = {each[1].decode(): each[3] for each in attributes if 3 in each}
            ops.append((dict(of_op)[3].decode(), named))
    return Program(tuple(parameters), tuple(ops))
