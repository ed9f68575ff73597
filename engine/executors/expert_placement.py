"""Places of experts on ranks (ENABLE_EXPERT_PARALLEL=1) by the usage that an earlier process has counted, so that the
ranks have equal loads. An order of the experts of a layer lists them by their place; the first rank has the first ones.

The exported model stays as it is: when a rank loads, it reads its experts from the files of all ranks and reorders the
rows of the router. So the router chooses the same experts and only the order of sums over ranks changes.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.exporting.manifest import Manifest, rank_dir
from engine.graph import Graph, Node, read_graph, read_params
from engine.models.weights import experts_of_rank
from engine.ops.catalogue import OPS
from engine.paddle_files import release
from engine.settings.config import Config
from engine.settings.disaggregation import MIXED
from engine.settings.processes import EXPERT_USAGE_FILE

log = logging.getLogger(__name__)

Orders = Mapping[str, Sequence[int]]  # by the name of the router's weights


class GatheredRows:
    """Parameter that consists of rows of others, which are read when it is read as an array."""

    def __init__(self, parts: Sequence[np.ndarray]):
        self.parts, self.dtype = parts, parts[0].dtype
        self.shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        self.nbytes = sum(part.nbytes for part in parts)

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        ends = list(itertools.accumulate(len(part) for part in self.parts))
        begins = [0, *ends[:-1]]
        wanted = zip(self.parts, begins, ends, strict=True)
        return np.concatenate(
            [part[max(0, start - begin) : stop - begin] for part, begin, end in wanted if begin < stop and end > start]
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        made = np.concatenate(self.parts)
        for part in self.parts:
            release(part)
        return made


def orders_by_usage(graph_dir: Path, config: Config) -> dict[str, list[int]]:
    """Return the orders for which the ranks would have had equal loads, or nothing if no usage of this model is known.

    They are not used by prefill and decode instances, whose caches must be equal to the last bit, nor with several
    machines, which do not have the files of all ranks.
    """
    manifest, files = Manifest.read(graph_dir), Manifest.read(graph_dir).graph()
    is_alone = config.machines.num_hosts == 1 and config.splitwise_role == MIXED
    if not (manifest.expert_parallel and manifest.num_ranks > 1 and files.parameters and is_alone):
        return {}
    usage = read_usage(config.engine_path(EXPERT_USAGE_FILE, config.engine_index), graph_dir.name)
    orders, loads = {}, np.zeros((2, manifest.num_ranks))
    graph = read_graph(rank_dir(graph_dir) / files.program, files.outputs)
    for node, name, num_experts in _routers(graph):
        if len(counts := usage.get(name, ())) == num_experts:
            order = balanced_order(counts, manifest.num_ranks, int(node.attributes["num_groups"]))
            loads += [_loads(counts, each, manifest.num_ranks) for each in (range(num_experts), order)]
            orders[name] = order
    if orders:
        before, now = loads.max(1) / loads.mean(1)
        text = "experts are placed by their usage: by that, the busiest rank has %.2f times the mean load, not %.2f"
        log.info(text, now, before)
    return orders


def read_usage(path: Path, model: str) -> dict[str, list[int]]:
    """Return the counts of `ExpertUsage.write` by router, or nothing if there are none of this model."""
    try:
        written = json.loads(path.read_text())
        return dict(written["layers"]) if written["model"] == model else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read, experts stay in their order: %s", path, error)
        return {}


def balanced_order(counts: Sequence[int], num_ranks: int, num_groups: int = 1) -> list[int]:
    """Return the order in which ranks with equal numbers of experts have about equal counts: the busiest expert first
    goes to the rank with the lowest count so far. If the router chooses groups, these stay together and in one piece.
    If ranks do not have whole groups, the experts stay in their order."""
    size = len(counts) // num_groups if num_groups > 1 else 1  # experts that stay together
    left = [len(experts_of_rank(len(counts), rank, num_ranks)) for rank in range(num_ranks)]
    if any(count % size for count in left):
        return list(range(len(counts)))
    of_units = np.reshape(counts, (-1, size)).sum(1)
    loads, units = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for unit in np.argsort(-of_units, kind="stable").tolist():
        rank = min((rank for rank in range(num_ranks) if left[rank]), key=loads.__getitem__)
        units[rank].append(unit)
        loads[rank] += int(of_units[unit])
        left[rank] -= size
    return [unit * size + place for of_rank in units for unit in sorted(of_rank) for place in range(size)]


def reorder_experts(graph: Graph, params: Mapping[str, Any], orders: Orders, graph_dir: Path) -> dict[str, Any]:
    """Return the parameters of the decoder of one rank for these orders. `params`: those of its file."""
    found = dict(params)
    if not orders:
        return found
    names, ranks = {value.id: name for name, value in graph.parameters.items()}, _params_of_ranks(graph_dir)
    mine: dict[int, list[tuple[int, int]]] = {}  # of a mixture, the ranks of its experts and their numbers there
    for node, router, num_experts in _routers(graph):
        if order := orders.get(router):
            for name in (names[value.id] for value in node.inputs[1:] if value):
                found[name] = np.asarray(params[name])[list(order)]
            sizes = [len(experts_of_rank(num_experts, rank, len(ranks))) for rank in range(len(ranks))]
            homes = [(rank, index) for rank, size in enumerate(sizes) for index in range(size)]
            mine[node.outputs[0].id] = [homes[expert] for expert in order[int(node.attributes["first_expert"]) :]]
    for node in graph.nodes:
        if OPS[node.op].is_mixture and (topk_ids := node.inputs[1]) and topk_ids.id in mine:
            count = int(node.attributes["num_experts"])
            for name in (names[value.id] for value in node.inputs if value and value.id in names):
                rows = graph.parameters[name].shape[0] // count
                homes = mine[topk_ids.id][:count]
                found[name] = GatheredRows([ranks[rank][name][at * rows : (at + 1) * rows] for rank, at in homes])
    return found


def _routers(graph: Graph) -> Iterator[tuple[Node, str, int]]:
    """Yield the routing op of each mixture, the name of its weights and the number of experts."""
    names = {value.id: name for name, value in graph.parameters.items()}
    for node in graph.nodes:
        if node.op == "moe_route" and (router := node.inputs[1]):
            yield node, names[router.id], router.shape[0]


def _params_of_ranks(graph_dir: Path) -> list[dict[str, np.ndarray]]:
    manifest = Manifest.read(graph_dir)
    files, directories = manifest.graph(), [rank_dir(graph_dir, rank) for rank in range(manifest.num_ranks)]
    return [
        read_params(directory / files.parameters, read_graph(directory / files.program, files.outputs))
        for directory in directories
    ]


def _loads(counts: Sequence[int], order: Sequence[int], num_ranks: int) -> np.ndarray:
    """Return the counts of each rank."""
    of_ranks = (experts_of_rank(len(counts), rank, num_ranks) for rank in range(num_ranks))
    return np.array([sum(counts[order[place]] for place in places) for places in of_ranks])
