"""Reads an exported graph without Paddle: what it computes (model.json) and with which weights (model.pdiparams)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.exporting.exported import PARAMETERS, PROGRAM, rank_dir
from engine.graph.nodes import Graph, GraphError, Node, Value
from engine.graph.params import read_params
from engine.graph.pir import read_graph

__all__ = ["Graph", "GraphError", "Node", "Value", "load", "read_graph", "read_params"]


def load(model_dir: Path, rank: int = 0) -> tuple[Graph, dict[str, np.ndarray]]:
    """The graph of one rank and its parameters by name, memory-mapped. Where there are no ranks, that in the folder."""
    directory = rank_dir(model_dir, rank)
    if not directory.is_dir():
        directory = model_dir
    graph = read_graph(directory / PROGRAM)
    return graph, read_params(directory / PARAMETERS, graph)
