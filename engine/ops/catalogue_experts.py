"""The ops of mixtures of experts: a part of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.ops.declaration import Op, arrays, attributes

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 0, 1, 2  # scorings of `moe_route`
SILU_GATE, GELU_GATE = 0, 1  # activations of `expert_gate_up`
# Formats of experts that GPUs have kernels for.
ON_GPUS = ("linear", "linear_int8", "linear_a8w8", "linear_int4", "linear_fp8", "linear_mxfp4")
# A format of experts alone: the catalogue has no such linear op.
MXFP4 = Op(
    "linear_mxfp4",
    arrays("x [T, K], weight u8 [N, K // 2], scale u8 [N, K // 32], bias? [N]"),
    arrays("y [T, N]"),
    (),
    """`linear_mxfp4` is `linear` with the `bf16` weight `number[n, k] · 2^(scale[n, k // 32] − 127)`. Byte `k // 2` of
    a row holds number `k`, the lower half the even one, as e2m1: a sign, two bits of exponent, one of mantissa.""",
    requires=("K % 32 == 0",),
    weights=("weight", "scale"),
    is_row_wise=False,
)

ROUTE = Op(
    "moe_route",
    arrays("x [T, H], weight [E, H], bias? [E], choice_bias? [E]"),
    arrays("topk_ids i32 [T, top_k], topk_weights [T, top_k]"),
    attributes(
        "top_k int, scoring int, num_groups int, top_groups int, group_best int, renormalize int, epsilon float, "
        "minimum float, factor float, first_expert int"
    ),
    """the experts of a token and the factors of their outputs, all in f32. `logits = x · weightᵀ + bias`. The scores
    are the softmax of the logits with `scoring` 0, their sigmoid with 1, the logits with 2. The experts with the
    `top_k` largest `scores + choice_bias` are chosen, the largest first, of equal ones the lower id first; a NaN
    counts as −∞. With several groups of `E / num_groups` experts each, only those of the `top_groups` groups are
    candidates whose `group_best` largest add up to most, of equal groups the lower ones. The weights are the scores
    of the chosen, with `scoring` 2 the softmax of these; with `renormalize` they are divided by `max(sum + epsilon,
    minimum)`; then they are multiplied by `factor`. Ids count from `first_expert`, the first expert that this rank
    has: those before it are negative.""",
    requires=(
        "0 <= scoring and scoring <= 2",
        "0 < num_groups and E % num_groups == 0",
        "0 < top_groups and top_groups <= num_groups",
        "0 < group_best and group_best <= E // num_groups",
        "0 < top_k and top_k <= top_groups * (E // num_groups)",
        "0 <= first_expert and first_expert < E",
    ),
    header="moe_route.h",
    cuda="routing",
)
ADD_GATED = Op(
    "add_gated",
    arrays("x [T, N], y [T, N], hidden [T, K], weight [1, K]"),
    arrays("z [T, N]"),
    (),
    """`z = x + y / (1 + exp(−hidden · weight))`: the output of a token's experts plus that of the gated expert that
    all tokens share (Qwen2-MoE).""",
    header="add_gated.h",
    cuda="routing",
)


def mixture_ops(linears: Sequence[Op]) -> tuple[Op, ...]:
    """Return the ops of mixtures of experts, with matrices in the formats of these linear ops."""
    return (ROUTE, *(each(linear) for linear in (*linears, MXFP4) for each in (_gate_up, _down)), ADD_GATED)


def _gate_up(linear: Op) -> Op:
    return replace(
        _of_experts(linear),
        name=f"expert_gate_up{_suffix(linear)}",
        inputs=(*arrays("x [T, K], topk_ids i32 [T, top_k]"), *_stacked(linear)),
        outputs=arrays("h [T, top_k * (N // 2)]"),
        attributes=attributes("num_experts int, activation int, limit float, alpha float, offset float"),
        formula=f"""`h[t, j] = act({linear.name}(x[t], matrix of expert topk_ids[t, j]))`, the slots `j` of a token side
        by side. The first half of a product is the gate, the second half `up`. With a `limit` above 0 they are
        clamped first: `gate = min(gate, limit)`, `up = min(max(up, −limit), limit)`. `act` is `(up + offset) · gate /
        (1 + exp(−alpha · gate))` with `activation` 0, `gelu(gate) · up` with 1. A slot whose id is not from 0 to
        `num_experts - 1`, an expert of another rank, has no values in `h`.{_definition(linear)}""",
        requires=(*linear.requires, "N % 2 == 0", "activation == 0 or activation == 1"),
    )


def _down(linear: Op) -> Op:
    return replace(
        _of_experts(linear),
        name=f"expert_down{_suffix(linear)}",
        inputs=(*arrays("h [T, top_k * K], topk_ids i32 [T, top_k], topk_weights [T, top_k]"), *_stacked(linear)),
        outputs=arrays("y [T, N]"),
        attributes=attributes("num_experts int"),
        formula=f"""`y[t] = sum_j topk_weights[t, j] · {linear.name}(h[t, j], matrix of expert topk_ids[t, j])`, added
        up in f32 in the order of the slots and rounded once. Slots of experts of other ranks are left
        out.{_definition(linear)}""",
    )


def _of_experts(linear: Op) -> Op:
    """Return the linear op with what all ops of experts share. They are no linear layers that adapters could change."""
    cuda = "experts" if linear.name in ON_GPUS else ""
    return replace(linear, header="experts.h", cuda=cuda, weights=())


def _stacked(linear: Op) -> tuple:
    """Return the matrices of all experts, stacked along their rows: expert `e` has the rows from `e * N` to below
    `(e + 1) * N`, also of scales, zeros and biases."""
    return tuple(replace(each, shape=(f"num_experts * {each.shape[0]}", *each.shape[1:])) for each in linear.inputs[1:])


def _definition(linear: Op) -> str:
    return f" {linear.formula}" if linear is MXFP4 else ""


def _suffix(linear: Op) -> str:
    return linear.name.removeprefix("linear")
