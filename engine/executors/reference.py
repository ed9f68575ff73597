"""Runs an exported graph with the numpy definitions of its ops: slow, and the oracle of every other executor."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np

from engine import graph
from engine.core.types import Batch, StepOutput
from engine.dtypes import held_as
from engine.executors.step_inputs import graph_inputs, sampling_rows, step_output
from engine.graph.run import run_graph
from engine.ops import reference


class ReferenceExecutor:
    """`ops` is any module with the functions of engine.ops.reference."""

    def __init__(self, graph_dir: Path, num_blocks: int, ops: ModuleType = reference):
        self._graph, self._params = graph.load(graph_dir)
        self._ops = ops
        self.num_blocks = num_blocks
        caches = {name: value for name, value in self._graph.inputs.items() if name.startswith("kv_cache_")}
        self.block_size = next(iter(caches.values())).shape[3]
        self._caches = {
            name: np.zeros((num_blocks, *value.shape[1:]), held_as(value.dtype)) for name, value in caches.items()
        }

    def warm_up(self) -> None:
        pass

    def step(self, batch: Batch) -> StepOutput:
        logits = run_graph(self._graph, self._params, graph_inputs(batch) | self._caches, self._ops)
        requests = [chunk.request for chunk in batch.chunks if chunk.samples]
        return step_output(self._ops.sample(logits, sampling_rows(requests)), requests)

    def close(self) -> None:
        self._caches.clear()
