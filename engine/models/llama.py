"""Llama 1 to 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import DecoderConfig, read_decoder
from engine.models.decoder import Attention, Decoder, DecoderLayer, GatedMlp
from engine.models.layers import Place
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Llama(DecoderConfig):
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Llama:
        biases = {name: bool(keys.get(name)) for name in ("attention_bias", "mlp_bias")}
        return read_decoder(cls, keys, **biases)

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, place: Place) -> DecoderLayer:
        attention = Attention.of(self, place, qkv_bias=self.attention_bias, o_bias=self.attention_bias)
        return DecoderLayer.of(self, place, attention, GatedMlp.of(self, place, self.mlp_bias))
