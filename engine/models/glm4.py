"""GLM-4: half of each head is rotated, in adjacent pairs. Since 2025 it also has norms behind attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.models.attention import Attention, AttentionOptions
from engine.models.config import DecoderConfig, read_decoder
from engine.models.decoder import PRE_NORM, Decoder, DecoderLayer
from engine.models.layers import LayerScope
from engine.models.mlp import GatedMlp
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Glm(DecoderConfig):
    """Configuration of a GLM-4 model of 2024."""

    attention_bias: bool
    rotates_partly = True
    norms: ClassVar[tuple[str, str, str, str]] = PRE_NORM

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Glm:
        given = {"num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5, **keys}
        own = {"has_rotary_pairs": True, "attention_bias": bool(keys.get("attention_bias", True))}
        return read_decoder(cls, given, own, head_dim=128)

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        attention = Attention.of(self, scope, AttentionOptions(qkv_bias=self.attention_bias))
        mlp = GatedMlp.of(self, scope, packed="mlp.gate_up_proj")
        return DecoderLayer.of(self, scope, (attention, mlp), self.norms)


class Glm4(Glm):
    """Configuration of a GLM-4 model since April 2025."""

    norms = ("input", "post_self_attn", "post_attention", "post_mlp")
