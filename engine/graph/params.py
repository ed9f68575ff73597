"""Reads the parameters of a graph from its model.pdiparams, and checks them against the graph's declarations."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine import paddle_files
from engine.dtypes import held_as
from engine.graph.nodes import Graph, GraphError


def read_params(path: Path, graph: Graph) -> dict[str, np.ndarray]:
    """Return the parameters by name, as read-only views of the memory-mapped file; bfloat16 is held as uint16.

    Raises GraphError if the file cannot be read, or if a parameter has another dtype or shape than the graph declares.
    """
    try:
        stored = paddle_files.read_params(path, graph.parameters)
    except paddle_files.PaddleFileError as error:
        raise GraphError(str(error)) from None
    for name, expected in graph.parameters.items():
        dtype, shape = stored[name].dtype.name, stored[name].shape
        if (dtype, shape) != (expected.dtype, expected.shape):
            found = f"is {dtype} {list(shape)}, the graph expects {expected.dtype} {list(expected.shape)}"
            raise GraphError(f"{path}: parameter {name}: {found}")
    return {name: array.view(held_as(array.dtype.name)) for name, array in stored.items()}
