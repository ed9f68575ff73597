"""Draft model, MTP layer and EAGLE-3 head on the CPU: a second graph, whose KV cache has the block ids of the target
model. It is used in the process of the first rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine import graph
from engine.core.types import Batch, Row
from engine.executors.cpu.draft_graph import CpuDraftGraph
from engine.executors.cpu.executor import CpuExecutor
from engine.executors.cpu.program import CpuProgram
from engine.executors.speculation.draft_model import DraftGraph, DraftRow
from engine.executors.speculation.draft_slots import DraftSlots, SlotSizes, graph_inputs
from engine.exporting.manifest import Manifest
from engine.models import eagle3
from engine.models.config import EAGLE3_GRAPH
from engine.models.layers import HIDDEN, LOGITS, PREVIOUS_STATES
from engine.ops import cpu

CHUNK = 256  # tokens of prompts that a run reads


class CpuDraftModel:
    """Draft model. Owns its graph and the state of the slots."""

    chunk = CHUNK

    def __init__(self, draft_graph: DraftGraph, max_seq_len: int, sizes: SlotSizes):
        """Take the graph of the draft model. `sizes` are those of the target model."""
        self.max_seq_len = max_seq_len
        self.block_bytes = draft_graph.block_bytes
        self._slots = DraftSlots(sizes)
        self.cache = self._slots.cache
        self._block_size = sizes.block_size
        self._graph = draft_graph

    @classmethod
    def load(cls, graph_dir: Path, sizes: SlotSizes) -> CpuDraftModel:
        """Load an exported draft model, of one rank."""
        model = Manifest.read(graph_dir)
        program = CpuProgram(*graph.load(graph_dir))
        return cls(CpuDraftGraph(program, model.graph().caches), model.max_seq_len, sizes)

    def allocate(self, num_blocks: int) -> None:
        self._graph.allocate(num_blocks)
        self._warm_up()
        self.cache.allocate(num_blocks)

    def _warm_up(self) -> None:
        """Run the longest step twice, so that no later one has to allocate memory. It overwrites block 0."""
        num_slots = len(self.cache.tables)
        self.cache.tables[:] = 0
        rows = [DraftRow(slot, 0, [0], True, 0) for slot in range(num_slots)]
        rows.append(DraftRow(0, 0, [0] * min(CHUNK, self._block_size), False, 0))
        for _ in range(2):
            self.run(rows, 1)

    def place(self, batch: Batch) -> None:
        """Take over the new requests and blocks of a step of the target model, and copy blocks as it does."""
        if copies := self._slots.place(batch):
            self._graph.copy(copies)

    launch, can_run_ahead = None, False

    def wait(self) -> list[list[int]]:
        raise NotImplementedError("a run on a CPU returns its tokens")

    def run(self, rows: Sequence[DraftRow], num_drafts: int) -> list[list[int]]:
        """Compute the tokens of the rows, and return one token for each row that samples; a negative one if none can be
        sampled."""
        sampling = [row for row in rows if row.samples]
        logits = self._logits(rows, sampling)
        values = self._slots.sampling_rows(sampling)
        if not values.temperature.any():  # the sampler takes longer than a small model
            return logits.argmax(axis=1)[:, None].tolist() if sampling else []
        return cpu.sample(logits, values).token_ids[:, None].tolist()

    def _logits(self, rows: Sequence[DraftRow], sampling: Sequence[DraftRow]) -> np.ndarray:
        return self._graph.run(self._inputs(rows))[LOGITS]

    def _inputs(self, rows: Sequence[DraftRow]) -> dict[str, np.ndarray]:
        """Return the inputs of the graph (docs/ops.md), without the caches."""
        width = max(row.start + len(row.token_ids) - 1 for row in rows) // self._block_size + 1
        tables = self.cache.tables[[row.slot for row in rows], :width]
        return {**graph_inputs(rows), "block_tables": tables}


class CpuMtpLayer(CpuDraftModel):
    """The MTP layer or the EAGLE-3 head of the target model. It shares tables with it, unless it has its own."""

    def __init__(self, first: CpuExecutor, draft_graph: DraftGraph, num_slots: int, name: str):
        """Take the first rank of the model, and the graph `name` of its export on all ranks."""
        model, ids = Manifest.read(first.graph_dir), first.graph_dir / eagle3.FILE
        self._draft_ids = np.load(ids) if name == EAGLE3_GRAPH and ids.exists() else None
        self._vocab_size = model.vocab_size
        self._first = first
        self.kept_states = None
        self.drafted_states: dict[int, np.ndarray] = {}
        super().__init__(draft_graph, model.max_seq_len, SlotSizes.of(model, num_slots))

    def step_states(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the last hidden states of the tokens of the last step, f32 [tokens, H], valid until the next."""
        assert self._first.states is not None
        return self._first.states

    def _logits(self, rows: Sequence[DraftRow], sampling: Sequence[DraftRow]) -> np.ndarray:
        given = [
            np.zeros((len(row.token_ids), self._graph.states_width)) if row.states is None else row.states
            for row in rows
        ]
        inputs = self._inputs(rows) | {PREVIOUS_STATES: np.concatenate(given, dtype=np.float32)}
        outputs = self._graph.run(inputs)
        for row, state in zip(sampling, outputs[HIDDEN], strict=True):
            self.drafted_states[row.slot] = state[None].copy()
        if self._draft_ids is None:
            return outputs[LOGITS]
        logits = np.full((len(sampling), self._vocab_size), -np.inf, np.float32)
        logits[:, self._draft_ids] = outputs[LOGITS]
        return logits
