"""Description of an exported graph as plain values, independent of files, tensors and devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import SetupError
from engine.ops.catalogue import OPS


class GraphError(SetupError):
    """A graph's file is missing, cut off or not supported by this version. The message names the file and the place."""


@dataclass(frozen=True)
class Value:
    """Input or output of a node, with its dtype and shape."""

    id: int
    dtype: str  # a name of numpy's dtypes, or bfloat16
    shape: tuple[int, ...]  # -1: a size that differs from step to step

    def __str__(self) -> str:
        return f"%{self.id} {self.dtype}[{', '.join('?' if n < 0 else str(n) for n in self.shape)}]"


@dataclass(frozen=True)
class Node:
    """One call of an op of the catalogue (docs/ops.md), with inputs and outputs in the order of the catalogue."""

    op: str
    inputs: tuple[Value | None, ...]  # None: an optional input that is not given
    outputs: tuple[Value, ...]
    attributes: Mapping[str, bool | int | float | str]

    @property
    def updated(self) -> Value | None:
        """Return the input that the op updates in place and returns as its last output, or None."""
        index = OPS[self.op].updated
        return None if index is None else self.inputs[index]


@dataclass(frozen=True)
class Graph:
    """An exported graph: inputs, parameters and outputs by name, and nodes in an order in which they can run."""

    inputs: Mapping[str, Value]
    parameters: Mapping[str, Value]
    nodes: tuple[Node, ...]
    outputs: Mapping[str, Value]

    def values_by_rows_of(self, name: str) -> set[int]:
        """Return the ids of the values that have one row per element of the input `name`."""
        found = {self.inputs[name].id}
        for node in self.nodes:
            rows = node.inputs[OPS[node.op].rows_of]
            if rows and rows.id in found:
                found |= {value.id for value in node.outputs}
        return found
