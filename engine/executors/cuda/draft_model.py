"""Draft model, MTP layer and EAGLE-3 head on a GPU: a second graph, whose KV cache has the block ids of the target
model. It is used in the process of the first rank.

Hidden states stay on the device, where a number stands for each. The draft tokens of a step are read back once, and the
step that verifies them can be launched before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.core.types import Batch, Row
from engine.executors.cuda.draft_graph import DEPTH, RING, CudaDraftGraph
from engine.executors.cuda.draft_runs import STATE_ROWS, VERIFIED, fields_of
from engine.executors.cuda.host_transfers import Download
from engine.executors.cuda.model_runner import ModelRunner
from engine.executors.speculation.draft_model import DraftGraph, DraftRow
from engine.executors.speculation.draft_slots import DraftSlots, SlotSizes, graph_inputs
from engine.exporting.manifest import Manifest
from engine.settings.config import Config


class CudaDraftModel:
    """Draft model. Owns its graph and the state of the slots."""

    def __init__(
        self, draft_graph: DraftGraph, max_seq_len: int, runner: ModelRunner, config: Config, sizes: SlotSizes
    ):
        """Take the graph of the draft model, and the target model of the first rank. `sizes` are those of the target
        model."""
        self._graph, self._device, self._block_size = draft_graph, runner.device, sizes.block_size
        self.max_seq_len, self.block_bytes = max_seq_len, draft_graph.block_bytes
        self._slots = DraftSlots(sizes)
        self.cache = self._slots.cache
        self.chunk = min(config.max_step_tokens, max_seq_len)
        self._null_block = 0
        memory, first_id = runner.draft_tokens
        self._drafts = memory.view(-1, sizes.num_slots)
        self._ids = first_id - np.arange(len(memory)).reshape(self._drafts.shape)
        self._download: Download | None = None  # of the last drafts
        self.can_run_ahead = isinstance(draft_graph, CudaDraftGraph)  # other ranks do not have the chosen tokens

    @classmethod
    def load(cls, graph_dir: Path, runner: ModelRunner, config: Config, sizes: SlotSizes) -> CudaDraftModel:
        """Load an exported draft model, of one rank."""
        draft_graph = CudaDraftGraph.of_model(graph_dir, runner, config, sizes)
        return cls(draft_graph, draft_graph.max_seq_len, runner, config, sizes)

    def allocate(self, num_blocks: int) -> None:
        self._null_block = num_blocks
        self.cache.allocate(num_blocks)
        self._graph.allocate(num_blocks)

    def place(self, batch: Batch) -> None:
        """Take over the new requests and blocks of a step of the target model, and copy blocks as it does."""
        if copies := self._slots.place(batch):
            self._graph.copy(copies)

    def run(self, rows: Sequence[DraftRow], num_drafts: int) -> list[list[int]]:
        """Compute the tokens of the rows, and return `num_drafts` tokens for each row that samples; negative ones if
        none can be sampled."""
        return _drafts(self._start(rows, num_drafts))

    def launch(self, rows: Sequence[DraftRow], num_drafts: int) -> list[list[int]]:
        """Launch a run. Return placeholders for its drafts in a step that the executor launches next."""
        download = self._start(rows, num_drafts)
        if not num_drafts:
            return []
        self._download = download
        return self._ids[:num_drafts, : sum(row.samples for row in rows)].T.tolist()

    def wait(self) -> list[list[int]]:
        """Wait for the run and return its drafts."""
        assert self._download
        return _drafts(self._download)

    def _start(self, rows: Sequence[DraftRow], num_drafts: int) -> Download:
        rows = sorted(rows, key=lambda row: not row.samples)
        num_sampling = sum(row.samples for row in rows)
        depth = num_drafts if num_sampling else 0
        self._graph.run(self._inputs(rows, depth))
        return Download.of({"drafts": self._drafts[:depth, :num_sampling]}, self._device)

    def _inputs(self, rows: Sequence[DraftRow], depth: int) -> dict[str, np.ndarray]:
        """Return the inputs of a run. The block tables reach to its last position, which may lie behind the blocks of a
        row that gets fewer drafts."""
        last = max(row.start + len(row.token_ids) - 1 for row in rows) + max(depth - 1, 0)
        slots = [row.slot for row in rows]
        tables = self.cache.tables_of(slots, last // self._block_size + 1, self._null_block)
        sampling = [row for row in rows if row.samples]
        inputs = fields_of(self._slots.sampling_rows(sampling)) | graph_inputs(rows)
        for index, row in enumerate(sampling):
            if row.verified:
                inputs[VERIFIED][:, index] = row.verified
                inputs["logit_rows"][index] -= row.verified.num_drafts
        inputs |= {"block_tables": tables, DEPTH: np.array([depth], np.int32)}
        if not self._graph.states_width:
            return inputs
        states = [np.zeros(len(row.token_ids), np.int32) if row.states is None else row.states for row in rows]
        return inputs | {STATE_ROWS: np.concatenate(states)}


def _drafts(download: Download) -> list[list[int]]:
    """Wait for drafts, and return those of each row."""
    return download.wait()["drafts"].T.tolist()


class CudaMtpLayer(CudaDraftModel):
    """The MTP layer or the EAGLE-3 head of the target model. It shares tables with it, unless it has its own."""

    def __init__(self, runner: ModelRunner, draft_graph: DraftGraph, config: Config):
        """Take the target model of the first rank, and the graph of SPECULATE_METHOD of its export on all ranks."""
        model = Manifest.read(runner.graph_dir)
        self._runner = runner
        self.drafted_states: dict[int, np.ndarray] = {}
        super().__init__(draft_graph, model.max_seq_len, runner, config, SlotSizes.of(model, config.batch_size))

    def step_states(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the row of each token of the step that was launched last, i32 [tokens]. The step writes its states
        there."""
        return self._runner.kept_rows.astype(np.int32)

    def kept_states(self, slot: int, start: int, end: int) -> np.ndarray:
        """Return the rows of the tokens of a slot from position `start` to `end`, i32 [end - start]."""
        return np.arange(start, end, dtype=np.int32) % RING + 1 + slot * RING
