"""HunYuan V1, dense: like Llama, with a norm of each head after the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import ROTATED_HEADS, Attention, AttentionOptions
from engine.models.config import DecoderConfig, read_decoder
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.layers import LayerScope
from engine.models.mlp import GatedMlp
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class HunYuan(DecoderConfig):
    """Configuration of a dense HunYuan V1 model."""

    attention_bias: bool

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> HunYuan:
        given = {"rms_norm_eps": 1e-5, **keys}
        return read_decoder(cls, given, {"attention_bias": bool(keys.get("attention_bias"))})

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        bias = self.attention_bias
        options = AttentionOptions(bias, bias, norms=ROTATED_HEADS, norm_names=("query_layernorm", "key_layernorm"))
        return DecoderLayer.of(self, scope, (Attention.of(self, scope, options), GatedMlp.of(self, scope)))
