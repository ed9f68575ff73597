"""Nemotron and Minitron, and Arcee: an MLP without a gate that squares a ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.models.attention import Attention, AttentionOptions
from engine.models.config import RELU_SQUARED, DecoderConfig, read_decoder
from engine.models.decoder import PRE_NORM, Decoder, DecoderLayer
from engine.models.layers import LayerNorm, LayerScope, Norm
from engine.models.mlp import Mlp
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Arcee(DecoderConfig):
    """Configuration of an Arcee model, whose other parts are Llama's."""

    attention_bias: bool
    mlp_bias: bool
    norm_kind: ClassVar[type[Norm]] = Norm

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Arcee:
        biases = {name: bool(keys.get(name)) for name in ("attention_bias", "mlp_bias")}
        return read_decoder(cls, {"rms_norm_eps": 1e-5, **keys}, biases, activations=RELU_SQUARED)

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer, self.norm_kind)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        attention = Attention.of(self, scope, AttentionOptions(self.attention_bias, self.attention_bias))
        mlp = Mlp.of(self, scope, ("up_proj", "down_proj"), self.mlp_bias, "relu_squared")
        return DecoderLayer.of(self, scope, (attention, mlp), PRE_NORM, self.norm_kind)


@dataclass(frozen=True, kw_only=True)
class Nemotron(Arcee):
    """Configuration of a Nemotron model: layer norms with 1 + weight, and positions that rotate a part of a head."""

    norm_offset: float = 1.0
    rotates_partly = True
    norm_kind: ClassVar[type[Norm]] = LayerNorm

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Arcee:
        epsilon = keys.get("norm_eps", 1e-5)
        return super().read({"partial_rotary_factor": 0.5, **keys, "rms_norm_eps": epsilon})
