"""Reference executor: runs an exported graph with the numpy definitions of its ops. It is slow, and all other executors
are tested against it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np

from engine import graph
from engine.core.types import Batch, Copy, StepOutput
from engine.dtypes import held_as
from engine.errors import InvalidRequest
from engine.executors.prompt_outputs import max_prompt_logits
from engine.executors.slots import Slots
from engine.executors.spans import SlotSpans
from engine.executors.step import StepWhenAsked
from engine.exporting.manifest import Manifest
from engine.graph.run import run_graph
from engine.models.kv_cache import BLOCK
from engine.models.layers import HIDDEN, LOGITS
from engine.ops import reference

NUM_SLOTS = 64
MAX_BLOCKS = 256  # of one request at most


class ReferenceExecutor:
    """Executor on numpy arrays. `ops` is any module that has the functions of engine.ops.reference."""

    max_drafts = 0
    thread = vision = expert_usage = draft_counts = None
    runs_ahead = False

    def __init__(self, graph_dir: Path, ops: ModuleType = reference):
        self._graph, params = graph.load(graph_dir)
        self._params = {name: np.asarray(each) for name, each in params.items()}
        self._ops = ops
        model = Manifest.read(graph_dir)
        self._specs = model.graph().caches
        self.block_size = model.block_size
        self.block_bytes = sum(spec.block_bytes for spec in self._specs)
        self.max_prompt_logits = max_prompt_logits(model.vocab_size)
        self.cache_groups = model.graph().cache_groups
        spans = SlotSpans.of(self._graph, NUM_SLOTS)
        self.takes_spans = spans is not None
        self._slots = Slots(NUM_SLOTS, MAX_BLOCKS, self.block_size, model.vocab_size, self.cache_groups, spans)
        self._caches: dict[str, np.ndarray] = {}

    def free_bytes(self) -> int:
        return 1 << 30

    def allocate(self, num_blocks: int) -> None:
        self._caches = {spec.name: np.zeros(spec.shape_of(num_blocks), held_as(spec.dtype)) for spec in self._specs}

    def warm_up(self) -> None:
        """Do nothing: all kernels are compiled when the server is installed."""

    def load_adapter(self, adapter: tuple[str, ...]) -> None:
        raise InvalidRequest("the definition of the ops has no adapters")

    def drop_adapter(self, adapter_id: str) -> None: ...

    def launch(self, batch: Batch) -> StepWhenAsked:
        return StepWhenAsked(lambda mask: self._compute(batch, mask))

    def close(self) -> None:
        self._caches.clear()

    def _compute(self, batch: Batch, mask: np.ndarray | None) -> StepOutput:
        self._slots.place(batch)
        for copy in batch.copies:
            self._copy(copy)
        outputs = run_graph(self._graph, self._params, self._slots.graph_inputs(batch) | self._caches, self._ops)
        logits, hidden = outputs[LOGITS], outputs[HIDDEN]
        output = self._slots.sample(batch, logits, mask, self._ops.sample)
        if not batch.has_prompt_outputs:
            return output
        return output._replace(
            prompt_outputs=self._slots.pooled_states.compute(batch, logits, hidden, self._ops.sample)
        )

    def _copy(self, copy: Copy) -> None:
        for spec in self._specs:
            blocks = np.moveaxis(self._caches[spec.name], spec.axes.index(BLOCK), 0)
            blocks[copy.target] = blocks[copy.source]
