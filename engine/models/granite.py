"""Granite 3: like Llama, with multipliers of embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import Attention, AttentionOptions
from engine.models.config import DecoderConfig, read_decoder
from engine.models.config_fields import number
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.experts import mlp_of
from engine.models.layers import LayerScope
from engine.models.mixture_config import MixtureConfig
from engine.models.weights import Shard

MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")


@dataclass(frozen=True, kw_only=True)
class Granite(DecoderConfig):
    """Configuration of a dense Granite 3 model."""

    attention_multiplier: float
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Granite:
        return cls.with_mixture(keys, None)

    @classmethod
    def with_mixture(cls, keys: Mapping[str, Any], mixture: MixtureConfig | None) -> Granite:
        given = {name: number(keys, name, 1.0) for name in MULTIPLIERS}
        own = {
            "embedding_multiplier": given["embedding_multiplier"],
            "residual_multiplier": given["residual_multiplier"],
            "logit_multiplier": 1 / given["logits_scaling"],
            "attention_multiplier": given["attention_multiplier"],
        }
        biases = {name: bool(keys.get(name)) for name in ("attention_bias", "mlp_bias")}
        return read_decoder(cls, keys, {**own, **biases, "mixture": mixture})

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        bias = self.attention_bias
        attention = Attention.of(self, scope, AttentionOptions(bias, bias, scale=self.attention_multiplier))
        return DecoderLayer.of(self, scope, (attention, mlp_of(self, scope, self.mlp_bias)))
