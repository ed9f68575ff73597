"""Qwen3: like Qwen2, with a norm of each query and key head instead of biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import HEADS, Attention, AttentionOptions
from engine.models.config import DecoderConfig, read_decoder
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.experts import mlp_of
from engine.models.layers import LayerScope
from engine.models.qwen2 import upper_windows
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Qwen3(DecoderConfig):
    """Configuration of a dense Qwen3 model."""

    attention_bias: bool

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Qwen3:
        own = {"attention_bias": bool(keys.get("attention_bias")), "windows": upper_windows(keys)}
        return read_decoder(cls, keys, own, head_dim=128)

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        bias = self.attention_bias
        options = AttentionOptions(bias, bias, norms=HEADS, window=self.window(scope.layer))
        attention = Attention.of(self, scope, options)
        return DecoderLayer.of(self, scope, (attention, mlp_of(self, scope)))
