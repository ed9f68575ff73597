"""Weights of 8-bit floats, which CPUs cannot multiply with: they become bfloat16 when a graph is loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.dtypes import from_fp8, held_as, to_bf16
from engine.graph import Graph
from engine.ops.catalogue import OPS

log = logging.getLogger(__name__)
CONVERTED_AT_ONCE = 1 << 22  # elements


@dataclass(frozen=True, eq=False)
class Fp8AsBf16:
    """Matrix of 8-bit floats that is converted to bfloat16 when it is read as an array."""

    numbers: np.ndarray
    scale: np.ndarray
    dtype = held_as("bfloat16")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        made = np.empty(self.shape, self.dtype)
        rows = max(1, CONVERTED_AT_ONCE // self.shape[1])
        for start in range(0, len(made), rows):
            part = slice(start, start + rows)
            made[part] = to_bf16(from_fp8(self.numbers[part], self.scale[part]))
        return made


def with_bf16_weights(
    graph: Graph, params: Mapping[str, np.ndarray]
) -> tuple[Graph, dict[str, np.ndarray | Fp8AsBf16]]:
    """Replace each op with a weight of 8-bit floats by the one with bfloat16.

    Return the new graph and its parameters, some of them `Fp8AsBf16`."""
    if count := sum(node.op.endswith("_fp8") for node in graph.nodes):
        log.info(
            "%d matrices of 8-bit floats become bfloat16, with which CPUs multiply: a weight takes two bytes, and"
            " activations are not rounded to 8-bit floats",
            count,
        )
    names = {value.id: name for name, value in graph.parameters.items()}
    kept: dict[str, np.ndarray | Fp8AsBf16] = dict(params)
    nodes = []
    for node in graph.nodes:
        if node.op.endswith("_fp8"):
            [at] = [index for index, each in enumerate(OPS[node.op].inputs) if each.name == "weight"]
            weight, scale = node.inputs[at : at + 2]
            assert weight and scale
            numbers, scales = names[weight.id], names[scale.id]
            kept[numbers] = Fp8AsBf16(params[numbers], params[scales])
            del kept[scales]
            inputs = (*node.inputs[: at + 1], *node.inputs[at + 2 :])
            node = replace(node, op=node.op.removesuffix("_fp8").removesuffix("_a8w8"), inputs=inputs)
        nodes.append(node)
    parameters = {name: value for name, value in graph.parameters.items() if name in kept}
    return replace(graph, nodes=tuple(nodes), parameters=parameters), kept
