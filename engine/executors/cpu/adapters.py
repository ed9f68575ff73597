"""LoRA adapters in the memory of a rank, and the rows of a step that use each. `llm_run` adds their products to the
linear calls of a graph, which is the same with and without adapters."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.core.types import Batch
from engine.errors import InvalidRequest, escape_braces
from engine.executors.cpu.program import large_pages
from engine.graph import Graph
from engine.models.adapters import Adapter, AdapterError, most_bytes, network_of, read_pairs
from engine.models.decoder import Decoder
from engine.ops.cpu.library import CAdapterPair, CAdapterRows
from engine.settings.config import Config

ALIGNED = 16  # float32 numbers of a cache line


class Groups(NamedTuple):
    """Rows of one step, grouped by adapter, as the arguments of `llm_run`."""

    array: ctypes.Array[CAdapterRows]
    rows: list[np.ndarray]  # keeps the memory alive that `array` points to


class Loaded(NamedTuple):
    """Matrices of one loaded adapter, as the arguments of `llm_run`."""

    pairs: ctypes.Array[CAdapterPair]
    memory: np.ndarray  # keeps the matrices alive that `pairs` points to


class CpuAdapters:
    """Loaded LoRA adapters of one rank. `place` is the rank and the number of ranks."""

    def __init__(self, graph_dir: Path, graph: Graph, place: tuple[int, int], config: Config):
        self._graph_dir, self._place = graph_dir, place
        self._max_rank = config.max_lora_rank
        self.reserved_bytes = config.max_loras * most_bytes(self._network, self._max_rank) if config.has_loras else 0
        names = {value.id: name for name, value in graph.parameters.items()}
        self._call_of = {
            names[node.inputs[1].id]: index
            for index, node in enumerate(graph.nodes)
            if node.op.startswith("linear") and node.inputs[1]
        }
        self.loaded: dict[str, Loaded] = {}  # by adapter id; changed only between steps

    @cached_property
    def _network(self) -> Decoder:
        return network_of(self._graph_dir, *self._place)

    def read(self, adapter: Adapter) -> Loaded:
        """Read an adapter's files. This may run in parallel with a step. Raises InvalidRequest."""
        try:
            pairs = [pair for pair in read_pairs(adapter, self._network, self._max_rank) if pair.b.size]
        except AdapterError as error:
            raise InvalidRequest(escape_braces(str(error)), field="lora_name") from None
        pairs.sort(key=lambda pair: (self._call_of[pair.parameter], pair.first))
        sizes = [-(-array.size // ALIGNED) * ALIGNED for pair in pairs for array in (pair.a, pair.b)]
        memory = large_pages(4 * sum(sizes)).view(np.float32)
        places = iter(np.cumsum([0, *sizes]).tolist())
        calls = (CAdapterPair * len(pairs))()
        for call, pair in zip(calls, pairs, strict=True):
            call.call, call.rank = self._call_of[pair.parameter], len(pair.a)
            call.first, call.num_out = pair.first, pair.b.shape[1]
            call.a, call.b = (_placed(array, memory, next(places)) for array in (pair.a, pair.b))
        return Loaded(calls, memory)

    def groups(self, adapter_of: Mapping[int, str], batch: Batch, inputs: Mapping[str, np.ndarray]) -> Groups | None:
        """Group the rows of a step by the adapters of their slots. Return None when no row has an adapter."""
        found = dict.fromkeys(adapter_of[row.slot] for row in batch.rows if row.slot in adapter_of)
        if not found:
            return None
        place_of = {adapter_id: place for place, adapter_id in enumerate(found)}
        of_row = [place_of.get(adapter_of.get(row.slot, ""), -1) for row in batch.rows]
        of_token = np.repeat(of_row, np.diff(inputs["query_starts"]))
        of_logits = of_token[inputs["logit_rows"]]
        array, kept = (CAdapterRows * len(found))(), []
        for group, (adapter_id, place) in zip(array, place_of.items(), strict=True):
            pairs = self.loaded[adapter_id].pairs
            group.pair = ctypes.addressof(pairs)
            group.end = group.pair + ctypes.sizeof(pairs)
            for index, of_each in enumerate((of_token, of_logits)):
                rows = np.flatnonzero(of_each == place).astype(np.int32)
                group.rows[index], group.num_rows[index] = rows.ctypes.data, len(rows)
                kept.append(rows)
        return Groups(array, kept)


def _placed(array: np.ndarray, memory: np.ndarray, start: int) -> int:
    """Copy `array` into `memory` from element `start` on and return the address of the copy."""
    there = memory[start : start + array.size].reshape(array.shape)
    np.copyto(there, array)
    return there.ctypes.data
