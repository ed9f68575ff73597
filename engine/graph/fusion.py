"""Operator fusion: replaces ops, one behind the other, by the fused ops of the catalogue that a device has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from engine.graph.nodes import Graph, Node, Value
from engine.ops.catalogue import FUSED
from engine.ops.declaration import LOGITS

BEHIND_LOGITS = ("all_gather", "scale", "softcap")  # ops that may lie between the product and the output


def fuse(graph: Graph, available: Collection[str], keep_products: bool = False) -> Graph:
    """Return `graph` with ops replaced by the fused ones among `available`.

    Ops are fused if only the next of them reads the output of each, and no op in between updates an input of an
    earlier one. The op that computes the logits, before any ops of BEHIND_LOGITS, forms a pair with LOGITS.
    `keep_products` excludes fused ops that do not store the product of a linear layer, so that adapters can be added to
    the products.
    """
    names = {op.fuses: op.name for op in FUSED if op.name in available and not (keep_products and op.hides_product)}
    num_readers = Counter(value.id for node in graph.nodes for value in node.inputs if value)
    num_readers.update(value.id for value in graph.outputs.values())
    made_by = {node.outputs[0].id: node for node in graph.nodes}
    nodes: list[Node] = []
    for node in graph.nodes:
        for fuses, name in names.items():
            chain = _chain(node, fuses, made_by, num_readers)
            if chain and all(_may_move(each, nodes) for each in chain[:-1]):
                for each in chain[:-1]:
                    nodes.remove(each)
                node = made_by[node.outputs[0].id] = _joined(name, chain)
                break
        nodes.append(node)
    logits = [graph.outputs["logits"]] if "logits" in graph.outputs else []
    for node in reversed(nodes):
        if node.op in BEHIND_LOGITS and node.outputs[0] in logits and node.inputs[0]:
            logits.append(node.inputs[0])
    for index, node in enumerate(nodes):
        if node.outputs[0] in logits:
            nodes[index] = replace(node, op=names.get((node.op, LOGITS), node.op))
    return replace(graph, nodes=tuple(nodes))


def _chain(
    node: Node, fuses: Sequence[str], made_by: Mapping[int, Node], num_readers: Mapping[int, int]
) -> list[Node] | None:
    """Return the nodes with the ops `fuses`, of which `node` is the last, if only the next one reads the output of
    each."""
    chain: list[Node] = []
    for op in reversed(fuses):
        if chain:
            value = chain[0].inputs[0]
            before = made_by.get(value.id) if value and num_readers[value.id] == 1 else None
        else:
            before = node
        if before is None or before.op != op:
            return None
        chain.insert(0, before)
    return chain


def _joined(name: str, chain: Sequence[Node]) -> Node:
    """Return the node that computes all of `chain`. An array that several of its nodes update is its input as it is
    before the first, and its output as it is behind the last."""
    inputs = (*chain[0].inputs, *(value for node in chain[1:] for value in node.inputs[1:]))
    made: dict[int, Value | None] = {}
    for node in chain[:-1]:
        made |= {value.id: made.get(node.updated.id, node.updated) for value in node.outputs[1:] if node.updated}
    read = {value.id for value in inputs if value}
    updated = (value for node in chain[:-1] for value in node.outputs[1:] if value.id not in read)
    inputs = tuple(made.get(value.id, value) if value else None for value in inputs)
    attributes = {key: number for node in chain for key, number in node.attributes.items()}
    return Node(name, inputs, (*chain[-1].outputs, *updated), attributes)


def _may_move(node: Node, nodes: list[Node]) -> bool:
    """Return whether a node of the list can be moved to its end, because no later node updates an input of it."""
    updated = [each.updated for each in nodes[nodes.index(node) + 1 :]]
    return not any(value in node.inputs for value in updated if value)
