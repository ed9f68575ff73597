"""Mixtures of experts: a router chooses, for each token, a few of many MLPs, whose weighted outputs are added up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.models.config import DecoderConfig
from engine.models.formats import FLOAT32
from engine.models.layers import LayerScope, Run, Tensor
from engine.models.mixture_config import MixtureConfig
from engine.models.mlp import GatedMlp
from engine.models.weights import AxisShard, Weight


@dataclass(frozen=True)
class Stack:
    """The same matrix of all experts, stacked along its rows, with the biases."""

    weight: Weight
    bias: Weight | None

    def __call__(self, run: Run, op: str, inputs: tuple[Tensor, ...], attributes: Mapping[str, float]) -> Tensor:
        bias = None if self.bias is None else run.stored(self.bias)[0]
        return self.weight.format.experts(run.ops, op, inputs, (*run.stored(self.weight), bias), **attributes)


@dataclass(frozen=True)
class SharedExpert:
    """The MLP that all tokens of a mixture share, with or without a gate of its output."""

    mlp: GatedMlp
    gate: Weight | None

    def add(self, run: Run, experts: Tensor, x: Tensor) -> Tensor:
        """Return the output of the experts plus that of this MLP, both of this rank."""
        y = self.mlp(run, x)
        if self.gate is None:
            return run.ops.add(y, experts)  # the product first, so that GPUs fuse it with the sum
        return run.ops.add_gated(experts, y, x, *run.stored(self.gate))


@dataclass(frozen=True)
class Mixture:
    """Mixture of experts of one layer on one rank, which has a share of the intermediate size of every expert or, with
    expert parallelism, some of the experts. Ranks always share the intermediate size of the shared expert.

    The router is never quantized, and every rank has it whole.
    """

    router: Weight
    router_bias: Weight | None
    choice_bias: Weight | None
    gate_up_proj: Stack
    down_proj: Stack
    shared: SharedExpert | None
    mixture: MixtureConfig
    experts: range  # those of this rank
    is_partial: bool  # each rank computes a part of the sum over the intermediate size or over the experts

    @classmethod
    def of(cls, config: DecoderConfig, scope: LayerScope) -> Mixture:
        """Build the mixture of the layer in `scope`."""
        mixture, shard = config.mixture, scope.shard
        assert mixture is not None, "the model has mixtures of experts"
        experts, hidden = AxisShard.whole(mixture.num_experts), AxisShard.whole(config.hidden_size)
        size, router = mixture.intermediate_size, f"{mixture.block}.{mixture.router}"
        of_experts = scope.of_experts.shard
        inner = (replace(of_experts, rank=0, num_ranks=1) if shard.expert_parallel else of_experts).inner(size)
        gate, up, down = mixture.projections
        choice_bias = [(f"{mixture.block}.{mixture.choice_bias}", (experts,))]
        return cls(
            router=scope.weight("router.weight", [(f"{router}.weight", (experts, hidden))]),
            router_bias=scope.weight("router.bias", [(f"{router}.bias", (experts,))]) if mixture.has_bias else None,
            choice_bias=scope.weight("router.choice_bias", choice_bias) if mixture.choice_bias else None,
            gate_up_proj=_stack(mixture, scope, "gate_up_proj", {gate: (inner, hidden), up: (inner, hidden)}),
            down_proj=_stack(mixture, scope, "down_proj", {down: (hidden, inner)}),
            shared=_shared(config, mixture, scope),
            mixture=mixture,
            experts=shard.experts(mixture.num_experts),
            is_partial=shard.num_ranks > 1,
        )

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        mixture, num_experts = self.mixture, {"num_experts": len(self.experts)}
        biases = [None if each is None else run.stored(each)[0] for each in (self.router_bias, self.choice_bias)]
        routing = {**mixture.routing.attributes, "first_expert": self.experts.start}
        ids, weights = run.ops.moe_route(x, *run.stored(self.router), *biases, **routing)
        h = self.gate_up_proj(run, "expert_gate_up", (x, ids), {**num_experts, **mixture.activation.attributes})
        y = self.down_proj(run, "expert_down", (h, ids, weights), num_experts)
        if self.shared:
            y = self.shared.add(run, y, x)
        return run.ops.all_reduce(y) if self.is_partial else y


def is_stack(name: str) -> bool:
    """Return whether a weight has this name that stores a matrix of all experts of a layer."""
    return name.endswith((".experts.gate_up_proj.weight", ".experts.down_proj.weight"))


def mlp_of(config: DecoderConfig, scope: LayerScope, bias: bool = False) -> GatedMlp | Mixture:
    """Return the mixture of experts of the layer in `scope`, or its MLP if it has none."""
    assert scope.layer is not None
    if config.mixture and config.mixture.layers[scope.layer]:
        return Mixture.of(config, scope)
    return GatedMlp.of(config, scope, bias)


def _stack(
    mixture: MixtureConfig, scope: LayerScope, name: str, parts: Mapping[str, tuple[AxisShard, AxisShard]]
) -> Stack:
    """Return the matrices `parts` of the experts of this rank: those of an expert one after another."""
    scope = scope.of_experts
    of_experts = [
        (f"{mixture.block}.experts.{expert}.{tensor}", axes)
        for expert in scope.shard.experts(mixture.num_experts)
        for tensor, axes in parts.items()
    ]
    weights = [(f"{tensor}.weight", axes) for tensor, axes in of_experts]
    biases = [(f"{tensor}.bias", _rows_of_bias(scope, axes)) for tensor, axes in of_experts]
    weight = scope.weight(f"experts.{name}.weight", weights, scope.shard.format)
    return Stack(weight, scope.weight(f"experts.{name}.bias", biases) if mixture.has_bias else None)


def _rows_of_bias(scope: LayerScope, axes: tuple[AxisShard, AxisShard]) -> tuple[AxisShard]:
    """Return the share of a bias. If ranks share the inputs, only the first rank adds it: the others have zeros."""
    rows, columns = axes
    is_added_here = columns.size >= columns.count or scope.shard.rank == 0
    return (rows if is_added_here else replace(rows, stop=rows.start),)


def _shared(config: DecoderConfig, mixture: MixtureConfig, scope: LayerScope) -> SharedExpert | None:
    if not mixture.shared:
        return None
    mlp = GatedMlp.shared(config, scope, f"{mixture.block}.{mixture.shared}", mixture.shared_size)
    if not mixture.shared_gate:
        return SharedExpert(mlp, None)
    axes = (AxisShard.whole(1), AxisShard.whole(config.hidden_size))
    gate = scope.weight("shared_gate.weight", [(f"{mixture.block}.{mixture.shared_gate}.weight", axes)], FLOAT32)
    return SharedExpert(mlp, gate)
