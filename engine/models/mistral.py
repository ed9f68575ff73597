"""Mistral and Ministral: like Llama without biases; none, some or all of the layers have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import Attention, AttentionOptions
from engine.models.config import DecoderConfig, layer_windows, read_decoder
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.experts import mlp_of
from engine.models.layers import LayerScope
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Mistral(DecoderConfig):
    """Configuration of a Mistral or Ministral model."""

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Mistral:
        # Mistral has no key use_sliding_window.
        return read_decoder(
            cls, {"num_key_value_heads": 8, **keys}, {"windows": layer_windows(keys, lambda layer: True)}
        )

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        attention = Attention.of(self, scope, AttentionOptions(window=self.window(scope.layer)))
        return DecoderLayer.of(self, scope, (attention, mlp_of(self, scope)))
