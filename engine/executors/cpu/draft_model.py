"""Draft model and MTP layer on the CPU: a second graph, whose KV cache has the block ids of the target model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine import graph
from engine.core.cache_groups import PAGED
from engine.core.types import Batch, Sampling
from engine.executors.cpu.executor import CpuExecutor
from engine.executors.cpu.program import CpuProgram, allocated
from engine.executors.draft_cache import DraftCache
from engine.executors.model_drafts import CHUNK, DraftRow
from engine.exporting.manifest import Manifest
from engine.models import eagle3
from engine.models.kv_cache import CacheSpec
from engine.models.layers import HIDDEN, LOGITS, PREVIOUS_STATES
from engine.ops import cpu
from engine.ops.sampling_rows import SamplingRows
from engine.sampling_parameters import PARAMETERS

# Penalties would need the tokens before; without them, drafts are only accepted less often.
COPIED = [parameter.name for parameter in PARAMETERS if not parameter.is_penalty]


class SlotSizes(NamedTuple):
    """Sizes of the target model that its draft model shares, and the index of the cache group with the block ids."""

    num_slots: int
    max_blocks: int  # of the longest request
    block_size: int
    group: int

    @classmethod
    def of(cls, model: Manifest, num_slots: int) -> SlotSizes:
        """Return the sizes of an exported model that serves so many requests at once."""
        group = [each.kind for each in model.graph().cache_groups].index(PAGED)
        return cls(num_slots, -(-model.max_seq_len // model.block_size), model.block_size, group)


class CpuDraftModel:
    """Draft model in the process of the first rank. Owns its program, its KV cache and the sampling rows of the slots.

    It draws tokens with the random numbers of the requests, at the same places of the answer: a draft model that
    computes the same probabilities draws the same tokens.
    """

    def __init__(self, program: CpuProgram, specs: Sequence[CacheSpec], max_seq_len: int, sizes: SlotSizes):
        """Take the program of the draft model and its caches. `sizes` are those of the target model."""
        self.max_seq_len, num_slots = max_seq_len, sizes.num_slots
        self._specs = specs
        self.block_bytes = sum(spec.block_bytes for spec in specs)
        self.cache = DraftCache(num_slots, sizes.max_blocks, sizes.block_size, sizes.group)
        self._block_size = sizes.block_size
        self._program = program
        self._caches: dict[str, np.ndarray] = {}
        self._rows = SamplingRows.greedy(num_slots)  # its `counter` is not used

    @classmethod
    def load(cls, graph_dir: Path, sizes: SlotSizes) -> CpuDraftModel:
        """Load an exported draft model."""
        model = Manifest.read(graph_dir)
        return cls(CpuProgram(*graph.load(graph_dir)), model.graph().caches, model.max_seq_len, sizes)

    def allocate(self, num_blocks: int) -> None:
        self._caches.clear()
        self._program.set_caches({})  # otherwise the old caches would stay alive beside the new ones
        self._caches = {spec.name: allocated(spec.shape_of(num_blocks), spec.dtype) for spec in self._specs}
        self._program.set_caches(self._caches)
        self._warm_up()
        self.cache.allocate(num_blocks)

    def _warm_up(self) -> None:
        """Run the longest step twice, so that no later one has to allocate memory. It overwrites block 0."""
        num_slots = len(self.cache.tables)
        self.cache.tables[:] = 0
        rows = [DraftRow(slot, 0, [0], True, 0) for slot in range(num_slots)]
        rows.append(DraftRow(0, 0, [0] * min(CHUNK, self._block_size), False, 0))
        for _ in range(2):
            self.run(rows)

    def place(self, batch: Batch) -> None:
        """Note the new requests and blocks of a step of the target model, and copy blocks as it does."""
        for arrival in batch.arrivals:
            self._set_sampling(arrival.slot, arrival.sampling)
        for source, target in self.cache.place(batch):
            for each in self._caches.values():
                each[target] = each[source]

    def run(self, rows: Sequence[DraftRow]) -> list[int]:
        """Compute the tokens of the rows, and return a token for each row that samples; a negative one if none can be
        sampled."""
        sampling = [row for row in rows if row.samples]
        logits = self._logits(rows, sampling)
        values = SamplingRows(self._rows.values[[row.slot for row in sampling]])
        if not values.temperature.any():  # the sampler takes longer than a small model
            return logits.argmax(axis=1).tolist() if sampling else []
        values.counter[:] = [row.num_answered for row in sampling]
        return cpu.sample(logits, values).token_ids.tolist()

    def _logits(self, rows: Sequence[DraftRow], sampling: Sequence[DraftRow]) -> np.ndarray:
        return self._program.run(self._inputs(rows))[LOGITS]

    def _set_sampling(self, slot: int, sampling: Sampling) -> None:
        for name in COPIED:
            self._rows.values[name][slot] = getattr(sampling, name)
        self._rows.seed[slot] = sampling.seed

    def _inputs(self, rows: Sequence[DraftRow]) -> dict[str, np.ndarray]:
        """Return the inputs of the graph (docs/ops.md), without the caches."""
        starts = np.array([row.start for row in rows], np.int32)
        slots = [row.slot for row in rows]
        if all(row.samples and len(row.token_ids) == 1 for row in rows):  # all runs but the first
            ends = np.arange(len(rows) + 1, dtype=np.int32)
            return {
                "token_ids": np.array([row.token_ids[0] for row in rows], np.int32),
                "positions": starts,
                "query_starts": ends,
                "context_lens": starts,
                "block_tables": self.cache.tables[slots, : int(starts.max()) // self._block_size + 1],
                "logit_rows": ends[:-1],
            }
        lengths = np.array([len(row.token_ids) for row in rows], np.int32)
        query_starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        width = int((starts + lengths).max() - 1) // self._block_size + 1
        positions = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(starts - query_starts[:-1], lengths)
        return {
            "token_ids": np.array([token_id for row in rows for token_id in row.token_ids], np.int32),
            "positions": positions,
            "query_starts": query_starts,
            "context_lens": starts,
            "block_tables": self.cache.tables[slots, :width],
            "logit_rows": (query_starts[1:] - 1)[[row.samples for row in rows]],
        }


class CpuMtpLayer(CpuDraftModel):
    """The MTP layer or the EAGLE-3 head of the target model. It shares tables with it, unless it has its own."""

    def __init__(self, executor: CpuExecutor, model: Manifest, num_slots: int, name: str):
        """Load the graph `name` of the exported model that `executor` runs."""
        program, specs = executor.load_graph(name), model.graph(name).caches
        ids = executor.graph_dir / eagle3.FILE
        self._draft_ids = np.load(ids) if name == eagle3.EAGLE3_GRAPH and ids.exists() else None
        self._vocab_size = model.vocab_size
        self._executor, self._hidden_size = executor, program.width_of(PREVIOUS_STATES)
        self.drafted_states: dict[int, np.ndarray] = {}
        super().__init__(program, specs, model.max_seq_len, SlotSizes.of(model, num_slots))

    @property
    def step_states(self) -> np.ndarray:
        """Return the last hidden states of the tokens of the last step, f32 [tokens, H], valid until the next."""
        assert self._executor.states is not None
        return self._executor.states

    def _logits(self, rows: Sequence[DraftRow], sampling: Sequence[DraftRow]) -> np.ndarray:
        given = [
            np.zeros((len(row.token_ids), self._hidden_size)) if row.states is None else row.states for row in rows
        ]
        inputs = self._inputs(rows) | {PREVIOUS_STATES: np.concatenate(given, dtype=np.float32)}
        outputs = self._program.run(inputs)
        for row, state in zip(sampling, outputs[HIDDEN], strict=True):
            self.drafted_states[row.slot] = state[None].copy()
        if self._draft_ids is None:
            return outputs[LOGITS]
        logits = np.full((len(sampling), self._vocab_size), -np.inf, np.float32)
        logits[:, self._draft_ids] = outputs[LOGITS]
        return logits
