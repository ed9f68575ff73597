"""Draft model on the CPU: a second exported graph, whose KV cache has the block ids of the target model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine import graph
from engine.core.cache_groups import PAGED, CacheGroup
from engine.core.types import Batch, Sampling
from engine.executors.cpu.program import CpuProgram, allocated
from engine.executors.draft_cache import DraftCache
from engine.executors.model_drafts import CHUNK, DraftRow
from engine.exporting.manifest import Manifest
from engine.models.layers import LOGITS
from engine.ops import cpu
from engine.ops.sampling_rows import SamplingRows
from engine.sampling_parameters import PARAMETERS

# Penalties would need the tokens before; without them, drafts are only accepted less often.
COPIED = [parameter.name for parameter in PARAMETERS if not parameter.is_penalty]


class CpuDraftModel:
    """Draft model in the process of the first rank. Owns its program, its KV cache and the sampling rows of the slots.

    It draws tokens with the random numbers of the requests, at the same places of the answer: a draft model that
    computes the same probabilities draws the same tokens.
    """

    def __init__(self, graph_dir: Path, num_slots: int, max_blocks: int, groups: Sequence[CacheGroup]):
        """Load the exported draft model. `max_blocks` and `groups` are those of the target model."""
        model = Manifest.read(graph_dir)
        self.max_seq_len, self.vocab_size = model.max_seq_len, model.vocab_size
        self._specs = model.graph().caches
        self.block_bytes = sum(spec.block_bytes for spec in self._specs)
        group = [each.kind for each in groups].index(PAGED)
        self.cache = DraftCache(num_slots, max_blocks, model.block_size, group)
        self._block_size = model.block_size
        self._program = CpuProgram(*graph.load(graph_dir))
        self._caches: dict[str, np.ndarray] = {}
        self._rows = SamplingRows.greedy(num_slots)  # its `counter` is not used

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
        logits = self._program.run(self._inputs(rows))[LOGITS]
        sampling = [row for row in rows if row.samples]
        values = SamplingRows(self._rows.values[[row.slot for row in sampling]])
        if not values.temperature.any():  # the sampler takes longer than a small model
            return logits.argmax(axis=1).tolist() if sampling else []
        values.counter[:] = [row.num_answered for row in sampling]
        return cpu.sample(logits, values).token_ids.tolist()

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
