"""The experts that a step of `benchmarks.gpu` reads, and a router that prefers some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
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
    graphs = executor.runner.graphs
    captured, graphs._decodes = graphs._decodes, []
    with _recorded(executor) as chosen:
        step()
        torch.cuda.synchronize()
    graphs._decodes = captured
    here = [ids[(ids >= 0) & (ids < num_experts)] for ids in chosen]  # others belong to experts of other ranks
    return sum(len(ids.unique()) for ids in here) / len(chosen)


def busiest_share(executor: Any) -> float:
    """Return the share of the busiest expert in the choices of a layer since the engine loop was made, on average."""
    counts = executor.expert_usage.counts()
    return float((counts.max(1) / counts.sum(1)).mean())


def skew(executor: Any, exponent: float) -> None:
    """Let the router of each layer of a CudaExecutor choose experts about as often as in a Zipf distribution with this
    exponent, by biases of the logits. Call this before steps are captured. The order of experts differs by layer."""
    program, generator = executor.runner.program, torch.Generator().manual_seed(0)
    for index, call in enumerate(program._calls):
        if _name(call.run) == "moe_route":
            weight, top_k = program._params[call.inputs[1]], call.run.keywords["top_k"]
            width = float(weight.float().std()) * weight.shape[1] ** 0.5  # of logits of inputs with a mean square of 1
            biases = width * zipf_biases(len(weight), top_k, exponent)
            order = torch.randperm(len(weight), generator=generator)
            run = partial(_biased, call.run, biases[order].to(weight.device))
            program._calls[index] = call._replace(run=run)


@cache
def zipf_biases(num_experts: int, top_k: int, exponent: float) -> Tensor:
    """Return biases for which the `top_k` largest of `num_experts` sums with normal noise are distributed by Zipf's
    law, except that no expert is chosen twice by a token."""
    noise = torch.randn(4096, num_experts, generator=torch.Generator().manual_seed(0))
    wanted = torch.arange(1, num_experts + 1) ** -float(exponent)
    biases = torch.zeros(num_experts)
    for _ in range(60):
        chosen = (noise + biases).topk(top_k).indices.flatten()
        shares = (torch.bincount(chosen, minlength=num_experts) + 1) / len(chosen)
        biases += 0.3 * (wanted / wanted.sum() / shares).log()
    return biases


def _biased(run: Callable[..., tuple[Tensor, Tensor]], bias: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    x, weight, own, *others = given
    return run(x, weight, bias if own is None else own + bias, *others)


@contextmanager
def _recorded(executor: Any) -> Iterator[list[Tensor]]:
    """Collect the experts that the op `moe_route` chooses."""
    program, found = executor.runner.program, list[Tensor]()

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
    """Return the name of the op that is called, with or without a bias of `skew`."""
    while isinstance(run, partial):
        run = run.args[0] if run.func is _biased else run.func
    return getattr(run, "__name__", "")
