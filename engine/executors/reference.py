"""Runs an exported graph with the numpy definitions of its ops: slow, and the oracle of every other executor."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np

from engine import graph
from engine.core.types import Batch, StepOutput
from engine.dtypes import held_as
from engine.executors.step_inputs import graph_inputs, sampling_rows, step_output
from engine.exporting.manifest import Manifest
from engine.graph.run import run_graph
from engine.ops import reference


class ReferenceExecutor:
    """`ops` is any module with the functions of engine.ops.reference."""

    def __init__(self, graph_dir: Path, num_blocks: int, ops: ModuleType = reference):
        self._graph, self._params = graph.load(graph_dir)
        self._ops = ops
        self.num_blocks = num_blocks
        model = Manifest.read(graph_dir)
        self.block_size = model.block_size
        self._caches = {c.name: np.zeros(c.shape_of(num_blocks), held_as(c.dtype)) for c in model.graph().caches}

    def warm_up(self) -> None:
        pass

    def step(self, batch: Batch) -> StepOutput:
        outputs = run_graph(self._graph, self._params, graph_inputs(batch) | self._caches, self._ops)
        requests = [chunk.request for chunk in batch.chunks if chunk.samples]
        return step_output(self._ops.sample(outputs["logits"], sampling_rows(requests)), requests)

    def close(self) -> None:
        self._caches.clear()
