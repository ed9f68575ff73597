"""The feed-forward networks (MLP) of decoder layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.models.attention import side_by_side
from engine.models.config import DecoderConfig
from engine.models.layers import LayerScope, Linear, Run, Tensor
from engine.models.weights import AxisShard


@dataclass(frozen=True)
class GatedMlp:
    """Gated MLP: `down(activation(gate(x)) * up(x))`."""

    gate_up_proj: Linear
    down_proj: Linear
    activation: str  # name of the op between the projections; it also multiplies gate and up

    @classmethod
    def of(
        cls, config: DecoderConfig, scope: LayerScope, bias: bool = False, packed: str = "", activation: str = "swiglu"
    ) -> GatedMlp:
        """Build the MLP. `packed` is the name of the tensor that stacks gate and up; empty: each has its own tensor."""
        scope, inner = _divided(config, scope)
        parts = [("mlp.gate_proj", inner), ("mlp.up_proj", inner)]
        gate_up = side_by_side(packed, (inner, inner)) if packed else parts
        return cls(
            Linear.columns(scope, "gate_up_proj", gate_up, config.hidden_size, bias),
            Linear.rows(scope, "mlp.down_proj", config.hidden_size, inner, bias),
            activation,
        )

    @classmethod
    def shared(cls, config: DecoderConfig, scope: LayerScope, module: str, size: int) -> GatedMlp:
        """Build the MLP of intermediate size `size` that all tokens of a mixture of experts share. On several ranks its
        output is a part of the sum, which the mixture completes."""
        inner = scope.shard.inner(size)
        parts = [(f"{module}.gate_proj", inner), (f"{module}.up_proj", inner)]
        down = Linear.rows(scope, f"{module}.down_proj", config.hidden_size, inner, bias=False)
        gate_up = Linear.columns(scope, "shared_gate_up_proj", parts, config.hidden_size, bias=False)
        return cls(gate_up, replace(down, is_partial=False), "swiglu")

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        return self.down_proj(run, getattr(run.ops, self.activation)(self.gate_up_proj(run, x)))


@dataclass(frozen=True)
class Mlp:
    """MLP without a gate: `down(activation(up(x)))`, with or without biases."""

    up_proj: Linear
    down_proj: Linear
    activation: str  # the name of an op

    @classmethod
    def of(
        cls, config: DecoderConfig, scope: LayerScope, names: tuple[str, str], bias: bool, activation: str = "gelu"
    ) -> Mlp:
        """Build the MLP. `names` are the checkpoint's names of the up and the down projection."""
        scope, inner = _divided(config, scope)
        up = [(f"mlp.{names[0]}", inner)]
        return cls(
            Linear.columns(scope, names[0], up, config.hidden_size, bias),
            Linear.rows(scope, f"mlp.{names[1]}", config.hidden_size, inner, bias),
            activation,
        )

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        return self.down_proj(run, getattr(run.ops, self.activation)(self.up_proj(run, x)))


def _divided(config: DecoderConfig, scope: LayerScope) -> tuple[LayerScope, AxisShard]:
    """Return the scope of an MLP with the format of its matrices, and the rank's share of the intermediate size."""
    scope = scope if config.mixture else scope.of_experts
    return scope, scope.shard.inner(config.intermediate_size)
