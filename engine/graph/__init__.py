"""Reads an exported graph without Paddle: its nodes (model.json) and its weights (model.pdiparams)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.exporting.manifest import DECODER, Manifest, rank_dir
from engine.graph.nodes import Graph, GraphError, Node, Value
from engine.graph.params import read_params
from engine.graph.pir import read_graph
from engine.graph.random_params import random_params
from engine.models.constants import constants_of

__all__ = ["Graph", "GraphError", "Node", "Value", "load", "read_graph", "read_params"]


def load(model_dir: Path, rank: int = 0, name: str = DECODER) -> tuple[Graph, dict[str, Any]]:
    """Return a graph of one rank, and its parameters by name: memory-mapped arrays, or `RandomParam` objects if it
    was exported without weights. Raises GraphError."""
    files, directory = Manifest.read(model_dir).graph(name), rank_dir(model_dir, rank)
    graph = read_graph(directory / files.program, files.outputs)
    if not files.parameters:
        return graph, random_params(graph, constants_of(model_dir))
    return graph, read_params(directory / files.parameters, graph)
