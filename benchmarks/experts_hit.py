"""The experts that a step of `benchmarks.gpu` reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.graph import Graph


def experts_of(graph: Graph) -> tuple[int, list[str]]:
    """Return the number of experts of a layer of the rank, and the names of the parameters that store experts. 0: no
    experts."""
    names = {value.id: name for name, value in graph.parameters.items()}
    nodes = [node for node in graph.nodes if node.op.startswith("expert_")]
    stored = [names[value.id] for node in nodes for value in node.inputs if value and value.id in names]
    return (int(nodes[0].attributes["num_experts"]) if nodes else 0), stored


def num_hit(executor: Any, step: Callable[[], object], num_experts: int) -> float:
    """Return the mean number of experts of a layer that `step` of a CudaExecutor reads, of its `num_experts`. The step
    is launched op by op."""
    graphs = executor._graphs
    captured, graphs._decodes = graphs._decodes, []
    with _recorded(executor) as chosen:
        step()
        torch.cuda.synchronize()
    graphs._decodes = captured
    here = [ids[(ids >= 0) & (ids < num_experts)] for ids in chosen]  # others belong to experts of other ranks
    return sum(len(ids.unique()) for ids in here) / len(chosen)


@contextmanager
def _recorded(executor: Any) -> Iterator[list[Tensor]]:
    """Collect the experts that the op `moe_route` chooses."""
    program, found = executor._program, list[Tensor]()

    def note(run: Callable[..., tuple[Tensor, Tensor]], *given: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = run(*given)
        found.append(ids)
        return ids, weights

    calls = program._calls
    program._calls = [
        call._replace(run=partial(note, call.run)) if _name(call.run) == "moe_route" else call for call in calls
    ]
    yield found
    program._calls = calls


def _name(run: Callable) -> str:
    return getattr(run.func if isinstance(run, partial) else run, "__name__", "")
