"""Counts of how many tokens chose each expert of each layer, which the first rank keeps.

They are part of the engine's statistics, and are written to a file at the end of the process, from which the next one
can place the experts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from engine.graph import Graph
from engine.models.weights import experts_of_rank

log = logging.getLogger(__name__)

NO_ORDERS: Mapping[str, Sequence[int]] = MappingProxyType({})
MIN_TOKENS = 10_000  # counts of fewer tokens are not written


class RoutedLayer(NamedTuple):
    """Mixture of experts of a graph."""

    name: str  # of the parameter with the router's weights
    num_experts: int  # of all ranks
    topk_ids: int  # id of the value with the chosen experts


def routed_layers(graph: Graph) -> list[RoutedLayer]:
    """Return the mixtures of a graph in the order in which they run."""
    names, found = {value.id: name for name, value in graph.parameters.items()}, []
    for node in graph.nodes:
        if node.op == "moe_route":
            router = node.inputs[1]
            assert router
            found.append(RoutedLayer(names[router.id], router.shape[0], node.outputs[0].id))
    return found


class Counter(Protocol):
    """Counts on a device, i64 [layers, experts]. `read` and `clear` may be called while another thread counts."""

    def read(self, is_final: bool = False) -> np.ndarray:
        """Return the counts: those of a moment ago, or with `is_final` those of all steps that have been launched."""
        ...

    def clear(self) -> None: ...


class HostCounter:
    """Counts in host memory."""

    def __init__(self, num_layers: int, num_experts: int):
        self._counts = np.zeros((num_layers, num_experts), np.int64)
        self._first = np.arange(num_layers) * num_experts  # index of the first expert of a layer

    def count(self, ids: Sequence[np.ndarray]) -> None:
        """Count the experts that were chosen: [rows, top_k] of each layer. The last may have fewer rows than others."""
        indices = np.concatenate(ids) + np.repeat(self._first, [len(chosen) for chosen in ids])[:, None]
        self._counts += np.bincount(indices.ravel(), minlength=self._counts.size).reshape(self._counts.shape)

    def read(self, is_final: bool = False) -> np.ndarray:
        return self._counts.copy()

    def clear(self) -> None:
        self._counts[:] = 0


class ExpertUsage:
    """Counts of all layers, and their division among ranks. `num_ranks`: that have different experts. `orders`: of the
    experts whose places `counter` counts, see `engine.executors.expert_placement`."""

    def __init__(
        self,
        layers: Sequence[RoutedLayer],
        counter: Counter,
        num_ranks: int = 1,
        orders: Mapping[str, Sequence[int]] = NO_ORDERS,
    ):
        self._names = [layer.name for layer in layers]
        self._orders = np.array([orders.get(layer.name, range(layer.num_experts)) for layer in layers])
        self._counter = counter
        self._first = [experts_of_rank(layers[0].num_experts, rank, num_ranks).start for rank in range(num_ranks)]

    def stats(self) -> dict[str, float]:
        """Return sums over all layers: of choices, and of those of the busiest expert and the busiest rank of each."""
        counts = self._counter.read()
        of_ranks = np.add.reduceat(counts, self._first, axis=1)
        return {
            "num_expert_choices": int(counts.sum()),
            "num_busiest_expert_choices": int(counts.max(1).sum()),
            "num_busiest_rank_choices": int(of_ranks.max(1).sum()),
        }

    def counts(self) -> np.ndarray:
        """Return how often each expert was chosen, [layers, experts], when all steps so far have ended."""
        of_places = self._counter.read(is_final=True)
        counts = np.empty_like(of_places)
        np.put_along_axis(counts, self._orders, of_places, axis=1)
        return counts

    def clear(self) -> None:
        """Forget the steps so far, which were not those of requests."""
        self._counter.clear()

    def write(self, path: Path, model: str) -> None:
        """Write the counts, unless there are too few to say anything. `model`: that they belong to. A failure is
        logged."""
        counts = self.counts()
        if counts[0].sum() < MIN_TOKENS:
            return
        layers = dict(zip(self._names, counts.tolist(), strict=True))
        try:
            path.write_text(json.dumps({"model": model, "layers": layers}) + "\n")
        except OSError as error:
            log.warning("the usage of experts cannot be written: %s", error)
