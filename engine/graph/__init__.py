"""Reads an exported graph without Paddle: its nodes (model.json) and its weights (model.pdiparams)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.exporting.manifest import DECODER, Manifest, rank_dir
from engine.graph.nodes import Graph, GraphError, Node, Value
from engine.graph.params import read_params
from engine.graph.pir import read_graph

__all__ = ["Graph", "GraphError", "Node", "Value", "load", "read_graph", "read_params"]


def load(model_dir: Path, rank: int = 0, name: str = DECODER) -> tuple[Graph, dict[str, np.ndarray]]:
    """Return a graph of one rank, and its parameters by name, memory-mapped. Raises GraphError."""
    files, directory = Manifest.read(model_dir).graph(name), rank_dir(model_dir, rank)
    graph = read_graph(directory / files.program, files.outputs)
    if not files.parameters:
        raise GraphError(f"{model_dir} was exported without weights (LOAD_FORMAT=dummy); only DEVICE=gpu draws some")
    return graph, read_params(directory / files.parameters, graph)
