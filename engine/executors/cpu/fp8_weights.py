"""Weights of 8-bit and 4-bit floats, which CPUs cannot multiply with: they become bfloat16 when a graph is loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.dtypes import from_fp8, from_mxfp4, held_as, to_bf16
from engine.graph import Graph
from engine.ops.catalogue import OPS

log = logging.getLogger(__name__)
CONVERTED_AT_ONCE = 1 << 22  # elements
CONVERTED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {"_fp8": from_fp8, "_mxfp4": from_mxfp4}


@dataclass(frozen=True, eq=False)
class FloatsAsBf16:
    """Matrix of 8-bit or 4-bit floats that is converted to bfloat16 when it is read as an array."""

    numbers: np.ndarray
    scale: np.ndarray
    suffix: str  # of the ops that multiply with it
    dtype = held_as("bfloat16")

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.numbers.shape
        return rows, columns * (2 if self.suffix == "_mxfp4" else 1)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        made = np.empty(self.shape, self.dtype)
        rows = max(1, CONVERTED_AT_ONCE // self.shape[1])
        for start in range(0, len(made), rows):
            part = slice(start, start + rows)
            made[part] = to_bf16(CONVERTED[self.suffix](self.numbers[part], self.scale[part]))
        return made


def with_bf16_weights(
    graph: Graph, params: Mapping[str, np.ndarray]
) -> tuple[Graph, dict[str, np.ndarray | FloatsAsBf16]]:
    """Replace each op with a weight of 8-bit or 4-bit floats by the one with bfloat16.

    Return the new graph and its parameters, some of them `FloatsAsBf16`."""
    if count := sum(node.op.endswith(tuple(CONVERTED)) for node in graph.nodes):
        log.info(
            "%d matrices of 8-bit or 4-bit floats become bfloat16, with which CPUs multiply: a weight takes two bytes,"
            " and activations are not rounded to 8-bit floats",
            count,
        )
    names = {value.id: name for name, value in graph.parameters.items()}
    kept: dict[str, np.ndarray | FloatsAsBf16] = dict(params)
    nodes = []
    for node in graph.nodes:
        for suffix in (each for each in CONVERTED if node.op.endswith(each)):
            [at] = [index for index, each in enumerate(OPS[node.op].inputs) if each.name == "weight"]
            weight, scale = node.inputs[at : at + 2]
            assert weight and scale
            numbers, scales = names[weight.id], names[scale.id]
            kept[numbers] = FloatsAsBf16(params[numbers], params[scales], suffix)
            del kept[scales]
            inputs = (*node.inputs[: at + 1], *node.inputs[at + 2 :])
            node = replace(node, op=node.op.removesuffix(suffix).removesuffix("_a8w8"), inputs=inputs)
        nodes.append(node)
    parameters = {name: value for name, value in graph.parameters.items() if name in kept}
    return replace(graph, nodes=tuple(nodes), parameters=parameters), kept
