"""Operator fusion: which pairs of ops become one, on the graph alone."""

import pytest

from engine.graph import Graph, Node, Value
from engine.graph.fusion import fuse
from engine.ops.catalogue import FUSED, OPS
from engine.ops.declaration import LOGITS

ALL = [op.name for op in FUSED]


def value(number: int) -> Value:
    return Value(number, "float32", (-1, 8))


def graph(*nodes: Node, output: Value, more: dict[str, Value] | None = None) -> Graph:
    return Graph({"x": value(0)}, {}, nodes, {"logits": output, **(more or {})})


def gated(**more) -> Graph:
    linear = Node("linear", (value(0), value(1), None), (value(2),), {})
    last = Node("rms_norm", (value(3), value(1)), (value(4),), {"epsilon": 0.5})
    return graph(linear, Node("swiglu", (value(2),), (value(3),), {}), last, output=value(4), **more)


def names(fused: Graph) -> list[str]:
    return [node.op for node in fused.nodes]


def test_a_linear_layer_and_the_swiglu_behind_it_become_one():
    fused = fuse(gated(), ALL)
    assert names(fused) == ["gated_linear", "rms_norm"]
    assert fused.nodes[0] == Node("gated_linear", (value(0), value(1), None), (value(3),), {})


def test_a_product_that_something_else_reads_stays():
    assert names(fuse(gated(more={"both": value(2)}), ALL)) == ["linear", "swiglu", "rms_norm"]


def normed(*between: Node) -> list[str]:
    norm = Node("head_norm", (value(0), value(1), value(1)), (value(2),), {"epsilon": 0.5})
    given = (value(2), value(3), value(4), value(5), value(6), value(7))
    attend = Node("paged_attention", given, (value(8), value(9)), {"scale": 1.0})
    return names(fuse(graph(norm, *between, attend, output=value(8)), ALL))


def test_ops_that_come_between_a_pair_stay_before_it():
    assert normed(Node("rotary_angles", (value(10),), (value(3),), {})) == [
        "rotary_angles",
        "head_norm_paged_attention",
    ]


def test_a_pair_stays_apart_where_an_op_in_between_updates_what_the_first_reads():
    update = Node("add_rms_norm", (value(10), value(0), value(1)), (value(11), value(12)), {})
    assert normed(update) == ["head_norm", "add_rms_norm", "paged_attention"]


def test_a_device_without_the_fused_op_keeps_the_pair():
    assert names(fuse(gated(), ["all_reduce_add_rms_norm"])) == ["linear", "swiglu", "rms_norm"]


def test_products_stay_where_adapters_are_added_to_them():
    assert names(fuse(gated(), ALL, keep_products=True)) == ["linear", "swiglu", "rms_norm"]


@pytest.mark.parametrize("keep_products", [False, True])
def test_a_sum_over_ranks_and_the_norm_behind_it_become_one_with_the_attributes_of_both(keep_products):
    total = Node("all_reduce", (value(0),), (value(1),), {})
    norm = Node("add_rms_norm", (value(1), value(2), value(3)), (value(4), value(5)), {"epsilon": 0.5})
    [fused] = fuse(graph(total, norm, output=value(4)), ALL, keep_products).nodes
    inputs, outputs = (value(0), value(2), value(3)), (value(4), value(5))
    assert fused == Node("all_reduce_add_rms_norm", inputs, outputs, {"epsilon": 0.5})
    assert fused.updated == value(2)


@pytest.mark.parametrize("keep_products", [False, True])
def test_a_product_before_the_sum_and_the_norm_joins_them_unless_adapters_are_added_to_it(keep_products):
    product = Node("linear", (value(0), value(1), None), (value(2),), {})
    total = Node("all_reduce", (value(2),), (value(3),), {})
    norm = Node("add_rms_norm", (value(3), value(4), value(5)), (value(6), value(7)), {"epsilon": 0.5})
    fused = fuse(graph(product, total, norm, output=value(6)), ALL, keep_products)
    together = "linear_all_reduce_add_rms_norm"
    assert names(fused) == (["linear", "all_reduce_add_rms_norm"] if keep_products else [together])
    assert fused.nodes[-1].updated == value(4)


@pytest.mark.parametrize("is_summed", [False, True])
def test_a_product_and_what_is_added_to_it_become_one_also_before_a_sum_over_ranks(is_summed):
    nodes = [
        Node("linear", (value(0), value(1), None), (value(2),), {}),
        Node("add", (value(2), value(3)), (value(4),), {}),
        Node("all_reduce", (value(4),), (value(5),), {}),
        Node("add_rms_norm", (value(5), value(6), value(7)), (value(8), value(9)), {"epsilon": 0.5}),
    ]
    [fused] = fuse(graph(*nodes, output=value(8)) if is_summed else graph(*nodes[:2], output=value(4)), ALL).nodes
    assert fused.op == ("linear_add_all_reduce_add_rms_norm" if is_summed else "linear_add")
    inputs = (value(0), value(1), None, value(3), *((value(6), value(7)) if is_summed else ()))
    assert fused.inputs == inputs and fused.updated == (value(6) if is_summed else None)


def test_a_product_that_is_added_to_something_before_it_stays():
    nodes = (
        Node("linear", (value(0), value(1), None), (value(2),), {}),
        Node("add", (value(3), value(2)), (value(4),), {}),
    )
    assert names(fuse(graph(*nodes, output=value(4)), ALL)) == ["linear", "add"]


@pytest.mark.parametrize("is_gathered", [False, True])
def test_the_product_that_makes_the_logits_has_an_op_of_its_own(is_gathered):
    nodes = [
        Node("linear", (value(0), value(1), None), (value(2),), {}),
        Node("linear", (value(2), value(1), None), (value(3),), {}),
    ]
    if is_gathered:
        nodes.append(Node("all_gather", (value(3),), (value(4),), {"num_ranks": 2, "width": 8}))
    fused = fuse(graph(*nodes, output=nodes[-1].outputs[0]), ALL)
    assert names(fused) == ["linear", "logits", *["all_gather"] * is_gathered]


def test_every_fused_op_is_made_of_ops_of_the_catalogue():
    for op in FUSED:
        first, *others = (OPS[name] for name in op.fuses if name != LOGITS)
        inputs = [*first.inputs, *(each for other in others for each in other.inputs[1:])]
        assert [each.types for each in op.inputs] == [each.types for each in inputs]


def latent_graph(*between: Node, out: int) -> Graph:
    before = Node("head_linear", (value(0), value(1)), (value(2),), {"num_heads": 2})
    given = (value(2), value(0), *(value(number) for number in range(3, 10)))
    attend = Node("latent_attention", given, (value(10), value(11)), {"num_heads": 2, "scale": 0.5})
    behind = Node("head_linear", (value(10), value(12)), (value(13),), {"num_heads": 2})
    return graph(before, *between, attend, behind, output=value(out))


def test_latent_attention_and_the_products_around_it_become_one():
    angles = Node("rotary_angles", (value(20),), (value(5),), {})
    before, fused = fuse(latent_graph(angles, out=13), ALL).nodes
    assert before == angles
    inputs = [0, 1, 0, *range(3, 10), 12]
    outputs, attributes = (value(13), value(11)), {"num_heads": 2, "scale": 0.5}
    assert fused == Node("projected_latent_attention", tuple(map(value, inputs)), outputs, attributes)
    assert fused.updated == value(6)


def test_three_ops_stay_apart_where_something_else_reads_what_is_between_them():
    update = Node("add_rms_norm", (value(20), value(0), value(21)), (value(22), value(23)), {})
    for kept in (latent_graph(out=10), latent_graph(update, out=13)):
        assert names(fuse(kept, ALL)) == [node.op for node in kept.nodes]


def test_the_parts_of_a_layer_with_a_state_become_one_that_reads_the_state_before_the_first():
    where, weights = tuple(map(value, (4, 5, 6))), tuple(map(value, (7, 8)))
    nodes = [
        Node("causal_conv", (value(1), value(2), value(3), *where), (value(10), value(11)), {"head_dim": 8}),
        Node("linear", (value(1), value(9), None), (value(12),), {}),
        Node("gated_delta_rule", (value(10), value(12), *weights, value(11), *where), (value(13), value(14)), {}),
        Node("gated_rms_norm", (value(13), value(15), value(16)), (value(17),), {"epsilon": 0.5}),
    ]
    linear, fused = fuse(graph(*nodes, output=value(17)), ALL).nodes
    assert linear == nodes[1]
    inputs = [1, 2, 3, 4, 5, 6, 12, 7, 8, 3, 4, 5, 6, 15, 16]
    attributes = {"head_dim": 8, "epsilon": 0.5}
    assert fused == Node("gated_delta_net", tuple(map(value, inputs)), (value(17), value(14)), attributes)
    assert fused.updated == value(3)
