"""CudaProgram: an exported graph as a list of calls of engine.ops.cuda, or of a module like it. Independent of batches
and of the cache's contents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from engine.executors.expert_usage import routed_layers
from engine.graph import Graph, GraphError, Node
from engine.graph.fusion import fuse
from engine.models.layers import HIDDEN, LOGIT_ROWS, LOGITS, STATES
from engine.ops.catalogue import FUSED
from engine.ops.cuda.adapters import Layer, add_adapters
from engine.ops.cuda.forward_context import forward_pass
from engine.ops.cuda.prefill_attention import KnownStarts
from engine.ops.cuda.vision import QueryTiles

GROUPS, LOGIT_GROUPS = "groups", "logit_groups"  # inputs described in `engine.ops.cuda.adapters`
NUM_TOKENS, NUM_LOGITS = "num_tokens", "num_logits"  # inputs i32 [1]: how many rows of a step are no padding
OF_TOKENS, OF_LOGITS, OF_NUM_TOKENS, OF_NUM_LOGITS = -1, -2, -3, -4  # their value ids
Params = Mapping[str, Any]  # a Tensor by name, or an OffloadedMatrix for experts of which a part is on the host
# by name; KnownStarts of query_starts inform attention, and logit_rows=None requests the outputs of all rows
Inputs = Mapping[str, Tensor | KnownStarts | QueryTiles | None]


class Outputs(NamedTuple):
    """Model outputs, one row for each requested token."""

    logits: Tensor  # f32 [S, V]
    hidden: Tensor  # [S, H], in the type of the activations
    states: Tensor | None = None  # [T, H], of all tokens, if a layer drafts from them

    def first(self, count: int) -> Outputs:
        return Outputs(self.logits[:count], self.hidden[:count], self.states)


class GraphCall(NamedTuple):
    """Call of one op."""

    run: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[int | None, ...]  # value ids
    outputs: tuple[int, ...]
    last: tuple[int, ...]  # inputs that no later call reads


class CudaProgram:
    """Executable form of a graph. `params` are on the device of the inputs.

    `layers` are the adapters' matrices by the names of the weights whose products they are added to. With them there
    are two more inputs, GROUPS and LOGIT_GROUPS.
    """

    def __init__(self, graph: Graph, params: Params, ops: ModuleType, layers: Mapping[str, Layer] | None = None):
        self.graph, self.params = graph, params
        self._params = {value.id: params[name] for name, value in graph.parameters.items()}
        self._inputs = {name: value.id for name, value in graph.inputs.items()}
        names = [name for name in (LOGITS, HIDDEN, STATES) if name in graph.outputs] or [*graph.outputs]
        self._outputs = [graph.outputs[name].id for name in names]
        fused = _fused(graph, ops, keep_products=bool(layers))
        self._calls = _calls(fused.nodes, {*self._params, *self._outputs}, ops)
        if layers:
            self._inputs |= {GROUPS: OF_TOKENS, LOGIT_GROUPS: OF_LOGITS}
            self._calls = _adapted(graph, self._calls, layers)

    def count_in(self, counts: Tensor) -> None:
        """Add the choices of experts to `counts`, i64 [layers, experts], from now on. There are two more
        inputs, NUM_TOKENS and NUM_LOGITS."""
        self._inputs |= {NUM_TOKENS: OF_NUM_TOKENS, NUM_LOGITS: OF_NUM_LOGITS}
        count_of = {layer.topk_ids: count for layer, count in zip(routed_layers(self.graph), counts, strict=True)}
        of_logits, calls = self.graph.values_by_rows_of(LOGIT_ROWS), self._calls
        for index, call in enumerate(calls):
            if (count := count_of.get(call.outputs[0])) is not None:
                num_real = OF_NUM_LOGITS if call.outputs[0] in of_logits else OF_NUM_TOKENS
                inputs = (*(*call.inputs, None, None)[:4], num_real)
                calls[index] = call._replace(run=partial(call.run, counts=count), inputs=inputs)

    def __call__(self, inputs: Inputs) -> Outputs:
        """Run the graph of a decoder. The caches among the inputs are updated in place."""
        return Outputs(*self.run(inputs))

    def run(self, inputs: Inputs) -> list[Tensor]:
        """Run the graph and return its outputs."""
        values = self._params | {value_id: inputs[name] for name, value_id in self._inputs.items()}
        with forward_pass():
            for run, given, outputs, last in self._calls:
                results = run(*[None if value_id is None else values[value_id] for value_id in given])
                for value_id in last:
                    del values[value_id]
                results = results if isinstance(results, tuple) else (results,)
                values.update(zip(outputs, results, strict=True))
        return [values[value_id] for value_id in self._outputs]


def check_ops(graph: Graph, ops: ModuleType) -> None:
    """Raise GraphError if the graph has an op that `ops` does not have, not even fused with the op behind it."""
    for node in _fused(graph, ops).nodes:
        _op(node, ops)


def _fused(graph: Graph, ops: ModuleType, *, keep_products: bool = False) -> Graph:
    return fuse(graph, [op.name for op in FUSED if hasattr(ops, op.name)], keep_products=keep_products)


def _calls(nodes: Sequence[Node], kept: set[int], ops: ModuleType) -> list[GraphCall]:
    last_use = {value.id: node for node in nodes for value in node.inputs if value is not None}
    calls = []
    for node in nodes:
        inputs = tuple(None if value is None else value.id for value in node.inputs)
        last = {value_id for value_id in inputs if value_id is not None and last_use[value_id] is node}
        outputs = tuple(value.id for value in node.outputs)
        calls.append(GraphCall(_op(node, ops), inputs, outputs, tuple(last - kept)))
    return calls


def _adapted(graph: Graph, calls: Sequence[GraphCall], layers: Mapping[str, Layer]) -> list[GraphCall]:
    """Return the calls with the adapters' products added after the linear layers that have some."""
    layer_of = {graph.parameters[name].id: layer for name, layer in layers.items()}
    of_logits = graph.values_by_rows_of(LOGIT_ROWS)
    made = []
    for call in calls:
        layer = next((layer_of[value_id] for value_id in call.inputs if value_id in layer_of), None)
        if layer:
            groups = OF_LOGITS if call.outputs[0] in of_logits else OF_TOKENS
            call = call._replace(run=partial(_then_adapt, call.run, layer), inputs=(*call.inputs, groups))
        made.append(call)
    return made


def _then_adapt(run: Callable[..., Tensor], layer: Layer, x: Tensor, *given: Tensor) -> Tensor:
    y = run(x, *given[:-1])
    add_adapters(y, x, layer, given[-1])
    return y


def _op(node: Node, ops: ModuleType) -> Callable:
    op = getattr(ops, node.op, None)
    if op is None:
        raise GraphError(
            f"the graph has the op {node.op}, which has no kernel for GPUs yet in {ops.__name__}; set DEVICE=cpu to run"
            " it, or export the model with another QUANT_TYPE"
        )
    return partial(op, **node.attributes) if node.attributes else op
