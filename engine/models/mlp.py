"""The feed-forward halves of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.attention import side_by_side
from engine.models.config import DecoderConfig
from engine.models.layers import Linear, Place, Run, Tensor


@dataclass(frozen=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    gate_up_proj: Linear
    down_proj: Linear
    activation: str  # the op that does all between the projections

    @classmethod
    def of(
        cls, config: DecoderConfig, place: Place, bias: bool = False, packed: str = "", activation: str = "swiglu"
    ) -> GatedMlp:
        """`packed`: the name of the one tensor that has the gate and then the up projection."""
        inner = place.shard.share(config.intermediate_size)
        parts = [("mlp.gate_proj", inner), ("mlp.up_proj", inner)]
        gate_up = side_by_side(packed, (inner, inner)) if packed else parts
        return cls(
            Linear.columns(place, "gate_up_proj", gate_up, config.hidden_size, bias),
            Linear.rows(place, "mlp.down_proj", config.hidden_size, inner, bias),
            activation,
        )

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        return self.down_proj(run, getattr(run.ops, self.activation)(self.gate_up_proj(run, x)))


@dataclass(frozen=True)
class Mlp:
    """down(gelu(up(x))), with biases or without."""

    up_proj: Linear
    down_proj: Linear

    @classmethod
    def of(cls, config: DecoderConfig, place: Place, names: tuple[str, str], bias: bool) -> Mlp:
        """`names`: of the two projections in the checkpoint."""
        inner = place.shard.share(config.intermediate_size)
        up = [(f"mlp.{names[0]}", inner)]
        return cls(
            Linear.columns(place, names[0], up, config.hidden_size, bias),
            Linear.rows(place, f"mlp.{names[1]}", config.hidden_size, inner, bias),
        )

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        return self.down_proj(run, run.ops.gelu(self.up_proj(run, x)))
