"""Gemma 1: norms with 1 + weight, GELU, and embeddings that are multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import Attention, AttentionOptions
from engine.models.config import GELU, DecoderConfig, read_decoder
from engine.models.config_fields import whole_number
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.layers import LayerScope
from engine.models.mlp import GatedMlp
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Gemma(DecoderConfig):
    """Configuration of a Gemma 1 model."""

    attention_bias: bool

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Gemma:
        given = {"num_key_value_heads": 16, "tie_word_embeddings": True, **keys}
        own = {
            "attention_bias": bool(keys.get("attention_bias")),
            "norm_offset": 1.0,
            "embedding_multiplier": whole_number(keys, "hidden_size") ** 0.5,
        }
        # Released checkpoints say "gelu" but were trained with its approximation, which hidden_activation names.
        return read_decoder(cls, given, own, head_dim=256, activations=("gelu", *GELU))

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        attention = Attention.of(self, scope, AttentionOptions(self.attention_bias, self.attention_bias))
        return DecoderLayer.of(self, scope, (attention, GatedMlp.of(self, scope, activation="geglu")))
