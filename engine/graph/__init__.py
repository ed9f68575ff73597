"""Reads an exported graph without Paddle: what it computes (model.json) and with which weights (model.pdiparams)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.graph.nodes import Graph, GraphError, Node, Value
from engine.graph.params import read_params
from engine.graph.pir import read_graph

__all__ = ["Graph", "GraphError", "Node", "Value", "load", "rank_dir", "read_graph", "read_params"]


def rank_dir(model_dir: Path, rank: int = 0) -> Path:
    """Where the files of a rank lie: rank_N, or the model's own folder where there are no ranks."""
    directory = model_dir / f"rank_{rank}"
    return directory if directory.is_dir() else model_dir


def load(model_dir: Path, rank: int = 0) -> tuple[Graph, dict[str, np.ndarray]]:
    """The graph of one rank and its parameters by name, memory-mapped."""
    directory = rank_dir(model_dir, rank)
    graph = read_graph(directory / "model.json")
    return graph, read_params(directory / "model.pdiparams", graph)
