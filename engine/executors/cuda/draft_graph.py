"""The graph of a draft model, an MTP layer or an EAGLE-3 head on a GPU, with its KV caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.core.types import Row
from engine.executors.cuda.cache import Caches
from engine.executors.cuda.compilation import KernelCompiler
from engine.executors.cuda.draft_runs import STATE_ROWS, DraftRunGraphs, DraftRuns, DraftSizes, fields_of
from engine.executors.cuda.load import RankFiles, load_program
from engine.executors.cuda.model_runner import ModelRunner
from engine.executors.cuda.program import CudaProgram
from engine.executors.speculation.draft_model import NUM_KEPT, SHORT, DraftRow
from engine.executors.speculation.draft_slots import SlotSizes, graph_inputs
from engine.exporting.manifest import Manifest, rank_dir
from engine.models import eagle3
from engine.models.config import EAGLE3_GRAPH
from engine.models.kv_cache import CacheSpec
from engine.ops import cuda
from engine.ops.cuda.drafted_tokens import DraftedTokens
from engine.ops.sampling_rows import SamplingRows
from engine.settings.config import Config

RING = NUM_KEPT + SHORT  # hidden states that are kept of a slot: those not yet read, and those of one more step
DEPTH = "depth"  # i32 [1]: tokens that a run samples for each row that samples


class LoadedGraph(NamedTuple):
    """A graph that drafts, on the device."""

    program: CudaProgram
    caches: Sequence[CacheSpec]
    max_seq_len: int
    draft_ids: Tensor | None = None  # the token of the target model for each of its tokens, unless they are the same
    states: Tensor | None = None  # memory for the hidden states that it reads


class CudaDraftGraph:
    """`DraftGraph` of one GPU. Owns its program, its KV caches and the captured CUDA graphs.

    The drafts of a run stay on the device, in the memory of the model runner for them. With several ranks each samples
    them for itself: all have the same logits.

    The graph of a layer also reads hidden states of the model, which every step of the model writes to a memory: row 0
    has zeros, then each slot has a ring of RING rows by position, then come rows for long prompts, which are read at
    once, and one for padding.
    """

    def __init__(self, graph: LoadedGraph, runner: ModelRunner, config: Config, sizes: SlotSizes):
        """Take a graph on the device of the target model's runner. `sizes` are those of the target model."""
        self._device, self._sizes, self.max_seq_len = runner.device, sizes, graph.max_seq_len
        self._caches = Caches(graph.caches, self._device)
        self.block_bytes = self._caches.block_bytes
        self.states_width = 0 if graph.states is None else graph.states.shape[1]
        self._chunk = min(config.max_step_tokens, graph.max_seq_len)
        self._max_drafts = config.speculate_max_draft_token_num
        bounds = DraftSizes(sizes.num_slots, self._max_drafts, sizes.max_blocks)
        tokens = DraftedTokens(sizes.num_slots, runner.draft_tokens[0], runner.chosen_tokens, graph.draft_ids)
        self._runs = DraftRuns(graph.program, bounds, tokens, graph.states, self._device)
        self._graphs = DraftRunGraphs(self._runs, config, bounds, self._device)
        self._compiler = KernelCompiler(self._device, lambda progress: None) if self._device.type == "cuda" else None

    @classmethod
    def of_model(cls, graph_dir: Path, runner: ModelRunner, config: Config, sizes: SlotSizes) -> CudaDraftGraph:
        """Load the graph of an exported draft model, of one rank."""
        model = Manifest.read(graph_dir)
        program = load_program(RankFiles(rank_dir(graph_dir), model.graph()), runner.device, cuda)
        return cls(LoadedGraph(program, model.graph().caches, model.max_seq_len), runner, config, sizes)

    @classmethod
    def of_layer(cls, name: str, runner: ModelRunner, config: Config) -> CudaDraftGraph:
        """Load the graph `name` of the model that `runner` runs: that of its MTP layer or of its EAGLE-3 head."""
        model, ids = Manifest.read(runner.graph_dir), runner.graph_dir / eagle3.FILE
        program, draft_ids = runner.load_graph(name), None
        if name == EAGLE3_GRAPH and ids.exists():
            draft_ids = torch.from_numpy(np.load(ids)).to(runner.device)
        first_long = 1 + config.batch_size * RING
        num_rows = first_long + config.max_step_tokens + 1
        states = runner.keep_states(num_rows, lambda rows: rows_of(rows, first_long))
        graph = LoadedGraph(program, model.graph(name).caches, model.max_seq_len, draft_ids, states)
        return cls(graph, runner, config, SlotSizes.of(model, config.batch_size))

    def allocate(self, num_blocks: int) -> None:
        self._graphs.clear()
        self._caches.clear()
        self._caches.allocate(num_blocks)
        self._runs.set_caches(self._caches.tensors)
        if self._compiler:
            self._compiler.compile_missing(self._warm_up)
            self._graphs.capture(self._caches.null_block, self._compiler)
            self._warm_up()

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            for layer in self._caches.words:
                layer[target] = layer[source]

    def run(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Launch a run, which samples DEPTH tokens for each row that samples. Its outputs stay on the device."""
        arrays = dict(inputs)
        self._graphs.launch(arrays, int(arrays.pop(DEPTH)[0]))
        return {}

    def _warm_up(self) -> None:
        """Run steps of every size op by op, in the null block: a row that does not sample keeps a run from being
        replayed. Attention has a kernel for each power of two of the programs that share a context, whose number
        follows from the width of the block tables."""
        rows = [DraftRow(slot, 0, [0], True, 0) for slot in range(self._sizes.num_slots)]
        reading = DraftRow(0, 0, [0], False, 0)
        lengths = [2**power + 1 for power in range(14) if 2**power < self._chunk - 1]
        for length in (1, *lengths, self._chunk):
            self._run_padding([DraftRow(0, 0, [0] * length, False, 0)], 0)
            self._run_padding([*rows[:length], reading], self._max_drafts)
        most = min(self._sizes.max_blocks, self.max_seq_len // self._sizes.block_size)
        for width in (2**power for power in range(most.bit_length())):
            for length in (1, 2):
                start = max(width * self._sizes.block_size - length - self._max_drafts + 1, 0)
                self._run_padding([DraftRow(0, start, [0] * length, True, 0), reading], self._max_drafts)

    def _run_padding(self, rows: Sequence[DraftRow], depth: int) -> None:
        """Run rows in the null block, and wait for them."""
        last = max(row.start + len(row.token_ids) for row in rows) - 1 + max(depth - 1, 0)
        shape = len(rows), last // self._sizes.block_size + 1
        inputs = graph_inputs(rows) | {"block_tables": np.full(shape, self._caches.null_block, np.int32)}
        if self.states_width:
            inputs[STATE_ROWS] = np.zeros(len(inputs["token_ids"]), np.int32)
        sampling = SamplingRows.greedy(sum(row.samples for row in rows))
        self._graphs.launch(fields_of(sampling) | inputs, depth)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def rows_of(rows: Sequence[Row], first_long: int) -> np.ndarray:
    """Return the row of the states of each token of a step, i64. `first_long` is the first one for long prompts."""
    if all(len(row.token_ids) <= SHORT for row in rows):
        starts, slots = np.array([(row.start, row.slot) for row in rows]).T
        lengths = np.fromiter((len(row.token_ids) for row in rows), np.int64, len(rows))
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
        return positions % RING + 1 + np.repeat(slots * RING, lengths)
    kept, long = [], first_long
    for row in rows:
        count, end = len(row.token_ids), row.start + len(row.token_ids)
        ring = np.arange(max(row.start, end - SHORT), end) % RING + 1 + row.slot * RING
        if count > SHORT:  # all of them are read before the next step, except the last one
            ring = np.append(np.arange(long, long + count - 1), ring[-1])
            long += count - 1
        kept.append(ring)
    return np.concatenate(kept)
