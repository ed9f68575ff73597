"""Draft model, MTP layer and EAGLE-3 head on a GPU: a second graph, whose KV cache has the block ids of the target
model.

Hidden states stay on the device, where a number stands for each. The draft tokens of a step are read back once, and the
step that verifies them can be launched before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.core.types import Batch, Row
from engine.executors.cuda.cache import Caches
from engine.executors.cuda.compilation import KernelCompiler
from engine.executors.cuda.draft_graphs import STATE_ROWS, DraftGraphs, DraftRuns, DraftSizes
from engine.executors.cuda.executor import CudaExecutor
from engine.executors.cuda.load import RankFiles, load_program
from engine.executors.cuda.program import CudaProgram
from engine.executors.cuda.transfer import Download
from engine.executors.draft_slots import DraftSlots, SlotSizes
from engine.executors.model_drafts import SHORT, DraftRow
from engine.exporting.manifest import Manifest, rank_dir
from engine.models import eagle3
from engine.models.kv_cache import CacheSpec
from engine.ops import cuda
from engine.ops.cuda.drafted_tokens import DraftedTokens
from engine.settings.config import Config

RING = 8 * SHORT  # hidden states that are kept of a slot: those not yet read, and those of one more step


class DraftGraph(NamedTuple):
    """A loaded graph that drafts."""

    program: CudaProgram
    caches: Sequence[CacheSpec]
    max_seq_len: int
    draft_ids: Tensor | None = None  # the token of the target model for each of its tokens, unless they are the same
    states: Tensor | None = None  # memory for the hidden states that it reads


class CudaDraftModel:
    """Draft model on the GPU of the only rank. Owns its program, its KV cache and the state of the slots."""

    def __init__(self, graph: DraftGraph, executor: CudaExecutor, config: Config, sizes: SlotSizes):
        """Take a graph on the device of the target model's executor. `sizes` are those of the target model."""
        self._device, self._block_size, self.max_seq_len = executor.device, sizes.block_size, graph.max_seq_len
        self._slots = DraftSlots(sizes)
        self.cache = self._slots.cache
        self._caches = Caches(graph.caches, self._device)
        self.block_bytes = self._caches.block_bytes
        self.chunk = min(config.max_step_tokens, graph.max_seq_len)
        self._max_drafts = config.speculate_max_draft_token_num
        bounds = DraftSizes(sizes.num_slots, self._max_drafts, sizes.max_blocks)
        memory, first_id = executor.draft_tokens
        tokens = DraftedTokens(sizes.num_slots, memory, graph.draft_ids)
        self._ids = first_id - np.arange(len(memory)).reshape(tokens.drafts.shape)
        self._download: Download | None = None  # of the drafts of the last run
        self._runs = DraftRuns(graph.program, bounds, tokens, graph.states, self._device)
        self._graphs = DraftGraphs(self._runs, config, bounds, self._device)
        self._compiler = KernelCompiler(self._device, lambda progress: None) if self._device.type == "cuda" else None

    @classmethod
    def load(cls, graph_dir: Path, executor: CudaExecutor, config: Config, sizes: SlotSizes) -> CudaDraftModel:
        """Load an exported draft model."""
        model = Manifest.read(graph_dir)
        program = load_program(RankFiles(rank_dir(graph_dir), model.graph()), executor.device, cuda)
        return cls(DraftGraph(program, model.graph().caches, model.max_seq_len), executor, config, sizes)

    def allocate(self, num_blocks: int) -> None:
        self._graphs.clear()
        self._caches.clear()
        self._caches.allocate(num_blocks)
        self._runs.caches = self._caches.tensors
        self.cache.allocate(num_blocks)
        if self._compiler:
            self._compile(self._warm_up)
            self._graphs.capture(self._caches.null_block, self._compile)
            self._warm_up()

    def place(self, batch: Batch) -> None:
        """Note the new requests and blocks of a step of the target model, and copy blocks as it does."""
        for source, target in self._slots.place(batch):
            for layer in self._caches.words:
                layer[target] = layer[source]

    def run(self, rows: Sequence[DraftRow], num_drafts: int) -> list[list[int]]:
        """Compute the tokens of the rows, and return `num_drafts` tokens for each row that samples; negative ones if
        none can be sampled."""
        self.begin(rows, num_drafts)
        return self.finish()

    def begin(self, rows: Sequence[DraftRow], num_drafts: int) -> list[list[int]]:
        """Launch a run. Return ids that stand for its drafts in a step that the executor launches next."""
        rows = sorted(rows, key=lambda row: not row.samples)
        sampling = [row for row in rows if row.samples]
        depth = num_drafts if sampling else 0
        self._graphs.launch(self._inputs(rows, depth), self._slots.sampling_rows(sampling), depth)
        drafts = self._runs.tokens.drafts[:depth, : len(sampling)]
        self._download = Download.of({"drafts": drafts}, self._device)
        return self._ids[:depth, : len(sampling)].T.tolist()

    def finish(self) -> list[list[int]]:
        """Wait for the run and return its drafts."""
        assert self._download
        return self._download.wait()["drafts"].T.tolist()

    def _inputs(self, rows: Sequence[DraftRow], depth: int) -> dict[str, np.ndarray]:
        """Return the inputs of the first step. The block tables reach to the last position of the run, which may lie
        behind the blocks of a row that gets fewer drafts."""
        last = max(row.start + len(row.token_ids) - 1 for row in rows) + max(depth - 1, 0)
        slots = [row.slot for row in rows]
        tables = self.cache.tables_of(slots, last // self._block_size + 1, self._caches.null_block)
        inputs = self._slots.inputs(rows) | {"block_tables": tables}
        if self._runs.states is None:
            return inputs
        states = [np.zeros(len(row.token_ids), np.int32) if row.states is None else row.states for row in rows]
        return inputs | {STATE_ROWS: np.concatenate(states)}

    def _warm_up(self) -> None:
        """Run steps of every size op by op, in the null block: a row that does not sample keeps a run from being
        replayed. Attention has a kernel for each power of two of the programs that share a context, whose number
        follows from the width of the block tables."""
        rows = [DraftRow(slot, 0, [0], True, 0) for slot in range(len(self.cache.tables))]
        reading = DraftRow(0, 0, [0], False, 0)
        lengths = [2**power + 1 for power in range(14) if 2**power < self.chunk - 1]
        for length in (1, *lengths, self.chunk):
            self.run([DraftRow(0, 0, [0] * length, False, 0)], 0)
            self.run([*rows[:length], reading], self._max_drafts)
        most = min(self.cache.tables.shape[1], self.max_seq_len // self._block_size)
        for width in (2**power for power in range(most.bit_length())):
            for length in (1, 2):
                start = max(width * self._block_size - length - self._max_drafts + 1, 0)
                self.run([DraftRow(0, start, [0] * length, True, 0), reading], self._max_drafts)

    def _compile(self, run: Callable[[], object]) -> None:
        """Compile the kernels that `run` would launch."""
        assert self._compiler
        with self._compiler.recording():
            run()
        self._compiler.compile()


class CudaMtpLayer(CudaDraftModel):
    """The MTP layer or the EAGLE-3 head of the target model. It shares tables with it, unless it has its own.

    Owns the hidden states that it has not read: row 0 has zeros, then each slot has a ring of RING rows by position,
    then come rows for long prompts, which are read at once, and one for padding.
    """

    def __init__(self, executor: CudaExecutor, model: Manifest, config: Config):
        """Load the graph of SPECULATE_METHOD of the exported model that `executor` runs."""
        name, num_slots = config.speculate_method, config.batch_size
        program, ids = executor.load_graph(name), executor.graph_dir / eagle3.FILE
        draft_ids = None
        if name == eagle3.EAGLE3_GRAPH and ids.exists():
            draft_ids = torch.from_numpy(np.load(ids)).to(executor.device)
        self.num_kept = RING - SHORT
        self._executor, self._first_long = executor, 1 + num_slots * RING
        num_rows = self._first_long + config.max_step_tokens + 1
        states = executor.keep_states(num_rows, self._rows_of)
        self.drafted_states: dict[int, np.ndarray] = {}
        graph = DraftGraph(program, model.graph(name).caches, model.max_seq_len, draft_ids, states)
        super().__init__(graph, executor, config, SlotSizes.of(model, num_slots))

    def step_states(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the row of each token of the step that was launched last, i32 [tokens]. The step writes its states
        there."""
        return self._executor.kept_rows.astype(np.int32)

    def _rows_of(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the row of each token of a step."""
        if all(len(row.token_ids) <= SHORT for row in rows):
            starts, slots = np.array([(row.start, row.slot) for row in rows]).T
            lengths = np.fromiter((len(row.token_ids) for row in rows), np.int64, len(rows))
            ends = np.cumsum(lengths)
            positions = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
            return positions % RING + 1 + np.repeat(slots * RING, lengths)
        kept, long = [], self._first_long
        for row in rows:
            count, end = len(row.token_ids), row.start + len(row.token_ids)
            ring = np.arange(max(row.start, end - SHORT), end) % RING + 1 + row.slot * RING
            if count > SHORT:  # all of them are read before the next step, except the last one
                ring = np.append(np.arange(long, long + count - 1), ring[-1])
                long += count - 1
            kept.append(ring)
        return np.concatenate(kept)
