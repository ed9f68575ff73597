"""Operator fusion: replaces pairs of ops by the fused ops of the catalogue that a device has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from engine.graph.nodes import Graph, Node
from engine.ops.catalogue import FUSED
from engine.ops.declaration import LOGITS

BEHIND_LOGITS = ("all_gather", "scale", "softcap")  # ops that may lie between the product and the output


def fuse(graph: Graph, available: Collection[str], keep_products: bool = False) -> Graph:
    """Return `graph` with pairs of ops replaced by the fused ones among `available`.

    A pair is fused if only the second op reads the output of the first, and no op in between updates an input of the
    first. The op that computes the logits, before any ops of BEHIND_LOGITS, forms a pair with LOGITS. `keep_products`
    excludes fused ops that do not store the product of a linear layer, so that adapters can be added to the products.
    """
    names = {op.fuses: op.name for op in FUSED if op.name in available and not (keep_products and op.hides_product)}
    num_readers = Counter(value.id for node in graph.nodes for value in node.inputs if value)
    num_readers.update(value.id for value in graph.outputs.values())
    made_by = {node.outputs[0].id: node for node in graph.nodes}
    nodes: list[Node] = []
    for node in graph.nodes:
        before = made_by.get(node.inputs[0].id) if node.inputs[0] else None
        name = names.get((before.op, node.op)) if before else None
        if before and name and num_readers[before.outputs[0].id] == 1 and _may_move(before, nodes):
            nodes.remove(before)
            inputs = (*before.inputs, *node.inputs[1:])
            node = Node(name, inputs, node.outputs, {**before.attributes, **node.attributes})
        nodes.append(node)
    logits = [graph.outputs["logits"]] if "logits" in graph.outputs else []
    for node in reversed(nodes):
        if node.op in BEHIND_LOGITS and node.outputs[0] in logits and node.inputs[0]:
            logits.append(node.inputs[0])
    for index, node in enumerate(nodes):
        if node.outputs[0] in logits:
            nodes[index] = replace(node, op=names.get((node.op, LOGITS), node.op))
    return replace(graph, nodes=tuple(nodes))


def _may_move(node: Node, nodes: list[Node]) -> bool:
    """Return whether a node of the list can be moved to its end, because no later node updates an input of it."""
    updated = [each.updated for each in nodes[nodes.index(node) + 1 :]]
    return not any(value in node.inputs for value in updated if value)
