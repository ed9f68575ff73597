"""An exported graph as a list of calls of engine.ops.cuda, or of one like it. Knows no batches and no cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from engine.graph import Graph, GraphError, Node
from engine.models.layers import HIDDEN, LOGITS

PRODUCTS = ("linear", "linear_int8", "linear_a8w8", "linear_int4", "linear_fp8")
FUSED = {(name, "swiglu"): f"gated_{name}" for name in PRODUCTS}
FUSED["all_reduce", "add_rms_norm"] = "all_reduce_add_rms_norm"
LAST = {"linear": "logits", "linear_int8": "logits_int8"}  # the last product of a graph, in float32


class Outputs(NamedTuple):
    """Of the rows that are wanted."""

    logits: Tensor  # f32 [S, V]
    hidden: Tensor  # [S, H], in the type of the activations

    def first(self, count: int) -> Outputs:
        return Outputs(self.logits[:count], self.hidden[:count])


class Call(NamedTuple):
    run: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[int | None, ...]  # values by their number
    outputs: tuple[int, ...]
    last: tuple[int, ...]  # inputs that no later call needs


class Program:
    """`params` are on the device that the inputs will be on."""

    def __init__(self, graph: Graph, params: Mapping[str, Tensor], ops: ModuleType):
        self.graph, self.params = graph, params
        self._params = {value.id: params[name] for name, value in graph.parameters.items()}
        self._inputs = {name: value.id for name, value in graph.inputs.items()}
        self._outputs = [graph.outputs[name].id for name in (LOGITS, HIDDEN)]
        self._calls = _calls(graph, {*self._params, *self._outputs}, ops)

    def __call__(self, inputs: Mapping[str, Tensor]) -> Outputs:
        """The caches among the inputs are updated."""
        values = self._params | {number: inputs[name] for name, number in self._inputs.items()}
        for run, given, outputs, last in self._calls:
            results = run(*[None if number is None else values[number] for number in given])
            for number in last:
                del values[number]
            for number, result in zip(outputs, results if isinstance(results, tuple) else (results,), strict=True):
                values[number] = result
        return Outputs(*[values[number] for number in self._outputs])


def _calls(graph: Graph, kept: set[int], ops: ModuleType) -> list[Call]:
    logits = _own_logits(graph, graph.outputs[LOGITS].id)
    nodes = _fused(graph.nodes)
    last_use = {value.id: node for node in nodes for value in node.inputs if value is not None}
    calls = []
    for node in nodes:
        inputs = tuple(None if value is None else value.id for value in node.inputs)
        last = {number for number in inputs if number is not None and last_use[number] is node}
        outputs = tuple(value.id for value in node.outputs)
        calls.append(Call(_op(node, logits, ops), inputs, outputs, tuple(last - kept)))
    return calls


def _own_logits(graph: Graph, output: int) -> int:
    """What becomes the output: of several ranks, before they put together what each has."""
    gathered = [node.inputs[0] for node in graph.nodes if node.op == "all_gather" and node.outputs[0].id == output]
    return gathered[0].id if gathered and gathered[0] else output


def _fused(nodes: Sequence[Node]) -> list[Node]:
    """As one: a product and the `swiglu` of its output, `all_reduce` and the `add_rms_norm` of its."""
    uses = Counter(value.id for node in nodes for value in node.inputs if value is not None)
    made_by = {node.outputs[0].id: node for node in nodes}
    fused: list[Node] = []
    for node in nodes:
        before = made_by.get(node.inputs[0].id) if node.inputs[0] else None
        name = FUSED.get((before.op, node.op)) if before else None
        if before and name and uses[before.outputs[0].id] == 1:
            fused.remove(before)
            node = Node(name, (*before.inputs, *node.inputs[1:]), node.outputs, node.attributes)
        fused.append(node)
    return fused


def _op(node: Node, logits: int, ops: ModuleType) -> Callable:
    is_last = node.op in LAST and node.outputs[0].id == logits
    op = getattr(ops, LAST[node.op] if is_last else node.op, None)
    if op is None:
        raise GraphError(f"the graph has the op {node.op}, which {ops.__name__} has not")
    return partial(op, **node.attributes) if node.attributes else op
