"""State that a draft model keeps of the slots of its target model, on any device: block tables, computed positions and
sampling parameters. Independent of tensors on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.core.cache_groups import PAGED
from engine.core.types import Batch, Sampling
from engine.executors.speculation.draft_cache import DraftCache
from engine.executors.speculation.draft_model import DraftRow
from engine.exporting.manifest import Manifest
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


class DraftSlots:
    """State of the slots. Builds the rows of the sampler.

    The draft model draws tokens with the random numbers of the requests, at the same places of the answer: one that
    computes the same probabilities draws the same tokens.
    """

    def __init__(self, sizes: SlotSizes):
        self.cache = DraftCache(sizes.num_slots, sizes.max_blocks, sizes.block_size, sizes.group)
        self._rows = SamplingRows.greedy(sizes.num_slots)  # its `counter` is not used

    def place(self, batch: Batch) -> list[tuple[int, int]]:
        """Take over the new requests and blocks of a step of the target model. Return the pairs of blocks to copy."""
        for arrival in batch.arrivals:
            self._set_sampling(arrival.slot, arrival.sampling)
        return self.cache.place(batch)

    def sampling_rows(self, rows: Sequence[DraftRow]) -> SamplingRows:
        """Return the parameters with which a token of each row is sampled."""
        values = SamplingRows(self._rows.values[[row.slot for row in rows]])
        values.counter[:] = [row.num_answered for row in rows]
        return values

    def _set_sampling(self, slot: int, sampling: Sampling) -> None:
        for name in COPIED:
            self._rows.values[name][slot] = getattr(sampling, name)
        self._rows.seed[slot] = sampling.seed


def graph_inputs(rows: Sequence[DraftRow]) -> dict[str, np.ndarray]:
    """Return the inputs of the graph (docs/ops.md), without the caches and the block tables."""
    starts = np.array([row.start for row in rows], np.int32)
    if all(row.samples and len(row.token_ids) == 1 for row in rows):  # all runs but the first
        ends = np.arange(len(rows) + 1, dtype=np.int32)
        return {
            "token_ids": np.array([row.token_ids[0] for row in rows], np.int32),
            "positions": starts,
            "query_starts": ends,
            "context_lens": starts,
            "logit_rows": ends[:-1],
        }
    lengths = np.array([len(row.token_ids) for row in rows], np.int32)
    query_starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    positions = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(starts - query_starts[:-1], lengths)
    return {
        "token_ids": np.array([token_id for row in rows for token_id in row.token_ids], np.int32),
        "positions": positions,
        "query_starts": query_starts,
        "context_lens": starts,
        "logit_rows": (query_starts[1:] - 1)[[row.samples for row in rows]],
    }
