"""The matrices of experts among the parameters of a graph."""

from __future__ import annotations

import math

from engine.dtypes import held_as
from engine.exporting.expert_sizes import ExpertSizes
from engine.graph.nodes import Graph

EXPERTS = "expert_"  # ops that multiply by matrices of experts: for each layer gate and up, then down


def expert_stacks(graph: Graph) -> list[tuple[str, ...]]:
    """Return the parameters of each node that multiplies by experts, in the order of the layers: first the matrix."""
    names = {value.id: name for name, value in graph.parameters.items()}
    nodes = [node for node in graph.nodes if node.op.startswith(EXPERTS)]
    return [tuple(names[value.id] for value in node.inputs if value and value.id in names) for node in nodes]


def expert_sizes(graph: Graph) -> ExpertSizes:
    values = [graph.parameters[stack[0]] for stack in expert_stacks(graph)]
    num_bytes = sum(math.prod(value.shape) * held_as(value.dtype).itemsize for value in values)
    numbers = [node.attributes["num_experts"] for node in graph.nodes if node.op.startswith(EXPERTS)]
    return ExpertSizes(len(values) // 2, int(numbers[0]) if numbers else 0, num_bytes)
