"""Gemma 2: norms with 1 + weight before and after attention and MLP, soft caps, and a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import Attention, AttentionOptions
from engine.models.config import GELU, DecoderConfig, layer_windows, read_decoder
from engine.models.config_fields import number, whole_number
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.layers import LayerScope
from engine.models.mlp import GatedMlp
from engine.models.weights import Shard

NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


@dataclass(frozen=True, kw_only=True)
class Gemma2(DecoderConfig):
    """Configuration of a Gemma 2 model."""

    attention_bias: bool
    attention_softcap: float
    query_scale: float

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Gemma2:
        given = {"num_key_value_heads": 4, "tie_word_embeddings": True, **keys}
        own = {
            "attention_bias": bool(keys.get("attention_bias")),
            "norm_offset": 1.0,
            "embedding_multiplier": whole_number(keys, "hidden_size") ** 0.5,
            "logit_softcap": number(keys, "final_logit_softcapping", 30.0) if _is_set(keys, "final") else 0.0,
            "attention_softcap": number(keys, "attn_logit_softcapping", 50.0) if _is_set(keys, "attn") else 0.0,
            "query_scale": number(keys, "query_pre_attn_scalar", 256) ** -0.5,
            "windows": layer_windows(keys, lambda layer: layer % 2 == 0),
        }
        return read_decoder(cls, given, own, head_dim=256, activations=GELU)

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        bias = self.attention_bias
        options = AttentionOptions(
            bias, bias, scale=self.query_scale, window=self.window(scope.layer), softcap=self.attention_softcap
        )
        mlp = GatedMlp.of(self, scope, activation="geglu")
        return DecoderLayer.of(self, scope, (Attention.of(self, scope, options), mlp), NORMS)


def _is_set(keys: Mapping[str, Any], which: str) -> bool:
    """Return whether a soft cap applies. It does by default; null in config.json removes it."""
    return keys.get(f"{which}_logit_softcapping", True) is not None
