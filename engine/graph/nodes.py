"""What a graph is made of. Plain values: no files, no tensors, no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import SetupError
from engine.ops.catalogue import OPS


class GraphError(SetupError):
    """A graph's file is missing, cut off or holds what this version cannot read. Names the file and the place."""


@dataclass(frozen=True)
class Value:
    """Something a node takes or makes."""

    id: int
    dtype: str  # numpy's names, and bfloat16
    shape: tuple[int, ...]  # -1: as long as the step makes it

    def __str__(self) -> str:
        return f"%{self.id} {self.dtype}[{', '.join('?' if n < 0 else str(n) for n in self.shape)}]"


@dataclass(frozen=True)
class Node:
    """One op of the catalogue (docs/ops.md) with its inputs and outputs in the catalogue's order."""

    op: str
    inputs: tuple[Value | None, ...]  # None: an optional input that is not given
    outputs: tuple[Value, ...]
    attributes: Mapping[str, bool | int | float | str]

    @property
    def updated(self) -> Value | None:
        """The input whose storage the op changes and gives back as its last output."""
        index = OPS[self.op].updated
        return None if index is None else self.inputs[index]


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which they can run."""

    inputs: Mapping[str, Value]
    parameters: Mapping[str, Value]
    nodes: tuple[Node, ...]
    outputs: Mapping[str, Value]

    def values_by_rows_of(self, name: str) -> set[int]:
        """The numbers of the values that have a row for each element of this input."""
        found = {self.inputs[name].id}
        for node in self.nodes:
            rows = node.inputs[OPS[node.op].rows_of]
            if rows and rows.id in found:
                found |= {value.id for value in node.outputs}
        return found
