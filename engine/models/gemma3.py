"""Gemma 3, the language model: each head is normalized; five of six layers have a window and a rope of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import HEADS, Attention, AttentionOptions
from engine.models.config import GELU, DecoderConfig, layer_windows, read_decoder
from engine.models.config_fields import ModelError, number, whole_number
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.gemma2 import NORMS
from engine.models.layers import LayerScope
from engine.models.mlp import GatedMlp
from engine.models.rope import ropes_by_layer_type
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Gemma3(DecoderConfig):
    """Configuration of the language model of Gemma 3."""

    attention_bias: bool
    query_scale: float

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Gemma3:
        pattern = whole_number(keys, "sliding_window_pattern", whole_number(keys, "_sliding_window_pattern", 6))
        head_dim, max_len = whole_number(keys, "head_dim", 256), whole_number(keys, "max_position_embeddings", 131072)
        local = {"rope_theta": keys.get("rope_local_base_freq") or 10000.0}
        rope, sliding_rope = ropes_by_layer_type({"rope_theta": 1e6, **keys}, head_dim, max_len, local)
        for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
            if keys.get(name):
                raise ModelError(f"config.json: {name} is {keys[name]!r}, supported is null")
        own = {
            "attention_bias": bool(keys.get("attention_bias")),
            "norm_offset": 1.0,
            "embedding_multiplier": whole_number(keys, "hidden_size") ** 0.5,
            "logit_softcap": number(keys, "final_logit_softcapping", 0.0),
            "query_scale": number(keys, "query_pre_attn_scalar", 256) ** -0.5,
            "windows": layer_windows(keys, lambda layer: (layer + 1) % pattern != 0),
            "rope": rope,
            "sliding_rope": sliding_rope,
        }
        given = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, **keys}
        given = {"tie_word_embeddings": True, **given, "max_position_embeddings": max_len}
        return read_decoder(cls, given, own, head_dim=256, activations=GELU)

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        rope, window = self.rope_of(scope.layer), self.window(scope.layer)
        bias, scale = self.attention_bias, self.query_scale
        options = AttentionOptions(bias, bias, norms=HEADS, rope=rope, scale=scale, window=window)
        mlp = GatedMlp.of(self, scope, activation="geglu")
        return DecoderLayer.of(self, scope, (Attention.of(self, scope, options), mlp), NORMS)
