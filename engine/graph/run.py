"""Runs a graph node by node with a Python function for each op. Independent of devices, batching and sampling."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import numpy as np

from engine.graph.nodes import Graph, GraphError
from engine.ops import reference


def run_graph(
    graph: Graph,
    params: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    ops: ModuleType = reference,
) -> dict[str, np.ndarray]:
    """Run the graph once and return its outputs by name. KV caches among the inputs are updated in place.

    `ops` has a function for each op, which takes inputs by position and attributes by name, and returns an array or a
    tuple of arrays. Raises GraphError if an input is missing.
    """
    if missing := graph.inputs.keys() - inputs.keys():
        raise GraphError(f"the graph needs input {min(missing)}")
    arrays = {value.id: params[name] for name, value in graph.parameters.items()}
    arrays |= {value.id: inputs[name] for name, value in graph.inputs.items()}
    last_use = {value.id: node for node in graph.nodes for value in node.inputs if value is not None}
    for output in graph.outputs.values():
        last_use.pop(output.id, None)
    for node in graph.nodes:
        given = [None if value is None else arrays[value.id] for value in node.inputs]
        results = getattr(ops, node.op)(*given, **node.attributes)
        results = results if isinstance(results, tuple) else (results,)
        arrays |= {value.id: array for value, array in zip(node.outputs, results, strict=True)}
        for value in node.inputs:
            if value is not None and last_use.get(value.id) is node:
                arrays.pop(value.id, None)
    return {name: arrays[value.id] for name, value in graph.outputs.items()}
