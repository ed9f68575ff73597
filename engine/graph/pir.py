"""Reads model.json: Paddle's intermediate representation (PIR) as `paddle.jit.save` writes it.

A program is one block of operations in the order of execution. Operations are named `dialect.name`, and the name of a
custom operation ends in an underscore if it updates an input in place. Value 0 stands for a missing optional input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.graph.nodes import Graph, GraphError, Node, Value
from engine.ops.catalogue import EXPORTED, OPS

DTYPES = {
    "0.t_bool": "bool",
    "0.t_i8": "int8",
    "0.t_ui8": "uint8",
    "0.t_i32": "int32",
    "0.t_i64": "int64",
    "0.t_f16": "float16",
    "0.t_bf16": "bfloat16",
    "0.t_f32": "float32",
}
OP_PREFIX = "llm_"  # the ops of the catalogue are registered with Paddle under this prefix
PADDLE_ATTRIBUTES = {"struct_name", "op_callstack", "stop_gradient"}  # used for messages and training only
NO_VALUE = 0


def read_graph(path: Path, output_names: Sequence[str]) -> Graph:
    """Read a graph. `output_names` are the names of its outputs in the manifest, since the program uses others.

    Raises GraphError if the file is missing, damaged or not supported.
    """
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise GraphError(f"{path} is missing") from None
    except ValueError as error:
        raise GraphError(f"{path} is cut off or not JSON: {error}") from None
    try:
        if document["base_code"]["magic"] != "pir":
            raise GraphError(f"{path} is not a Paddle program: its magic is {document['base_code']['magic']!r}")
        (region,) = document["program"]["regions"]
        (block,) = region["blocks"]
        operations = block["ops"]
    except (KeyError, TypeError, ValueError) as error:
        raise GraphError(f"{path} is not a Paddle program of one block: {error!r}") from None
    reader = _Reader()
    for index, operation in enumerate(operations):
        try:
            reader.read(operation)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise GraphError(f"{path}: operation {index} ({operation.get('#')}) cannot be read: {error!r}") from None
        except GraphError as error:
            raise GraphError(f"{path}: operation {index}: {error}") from None
    if len(reader.outputs) != len(output_names):
        raise GraphError(f"{path} has {len(reader.outputs)} outputs, its manifest names {', '.join(output_names)}")
    outputs = dict(zip(output_names, reader.outputs, strict=True))
    return Graph(reader.inputs, reader.parameters, tuple(reader.nodes), outputs)


class _Reader:
    """Builds a graph from its operations, one at a time."""

    def __init__(self) -> None:
        self.inputs: dict[str, Value] = {}
        self.parameters: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.outputs: list[Value] = []
        self._values: dict[int, Value] = {}
        self._special: dict[str, Callable[[dict[str, Any]], None]] = {
            "p": self._read_parameter,
            "data": self._read_input,
            "fetch": self._read_output,
        }

    def read(self, operation: dict[str, Any]) -> None:
        dialect, _, name = operation["#"].rpartition(".")
        if name in self._special:
            self._special[name](operation)
        elif name.startswith(OP_PREFIX):
            self._read_node(operation, name)
        else:
            raise GraphError(f"{operation['#']!r} is not an op of the catalogue (docs/ops.md)")

    def _read_parameter(self, operation: dict[str, Any]) -> None:
        name = operation["A"][3]
        self.parameters[name] = self._define(operation["O"])

    def _read_input(self, operation: dict[str, Any]) -> None:
        name = _attributes(operation)["name"]
        self.inputs[name] = self._define(operation["O"][0])

    def _read_output(self, operation: dict[str, Any]) -> None:
        self.outputs.append(self._find(operation["I"][0]))

    def _read_node(self, operation: dict[str, Any], name: str) -> None:
        op = name.removeprefix(OP_PREFIX).removesuffix("_")
        if op not in OPS or OPS[op].fuses:
            raise GraphError(f"{operation['#']!r} is not an op of the catalogue (docs/ops.md)")
        if name.endswith("_") != (OPS[op].updated is not None):
            in_place = ", ".join(each.name for each in EXPORTED if each.updated is not None)
            raise GraphError(f"{name!r}: in place, as the underscore says, are {in_place}")
        self.nodes.append(
            Node(
                op=op,
                inputs=tuple(None if ref["%"] == NO_VALUE else self._find(ref) for ref in operation["I"]),
                outputs=tuple(self._define(output) for output in operation["O"]),
                attributes={k: v for k, v in _attributes(operation).items() if k not in PADDLE_ATTRIBUTES},
            )
        )

    def _define(self, output: dict[str, Any]) -> Value:
        type_name, shape = output["TT"]["D"][0]["#"], output["TT"]["D"][1]
        if type_name not in DTYPES:
            raise GraphError(f"value {output['%']} has the unknown type {type_name!r}")
        value = Value(output["%"], DTYPES[type_name], tuple(shape))
        self._values[value.id] = value
        return value

    def _find(self, reference: dict[str, int]) -> Value:
        value = self._values.get(reference["%"])
        if value is None:
            raise GraphError(f"value {reference['%']} is used before it is made")
        return value


def _attributes(operation: dict[str, Any]) -> dict[str, Any]:
    return {attribute["N"]: attribute["AT"].get("D") for attribute in operation["A"]}
