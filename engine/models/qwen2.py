"""Qwen2 and Qwen2.5: queries, keys and values have biases; with use_sliding_window, the upper layers have a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import Attention, AttentionOptions
from engine.models.config import DecoderConfig, layer_windows, read_decoder
from engine.models.config_fields import whole_number
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.experts import mlp_of
from engine.models.layers import LayerScope
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Qwen2(DecoderConfig):
    """Configuration of a Qwen2 or Qwen2.5 model."""

    qkv_bias: bool = True

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Qwen2:
        return read_decoder(cls, keys, {"windows": upper_windows(keys)})

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        attention = Attention.of(self, scope, AttentionOptions(qkv_bias=self.qkv_bias, window=self.window(scope.layer)))
        return DecoderLayer.of(self, scope, (attention, mlp_of(self, scope)))


def upper_windows(keys: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the window of each layer in tokens, where 0 stands for full attention.

    The first max_window_layers layers, which may be 0, have full attention, and those above have sliding_window.
    """
    if not keys.get("use_sliding_window"):
        return layer_windows(keys, lambda layer: False)
    num_full_layers = 0 if keys.get("max_window_layers") == 0 else whole_number(keys, "max_window_layers", 28)
    return layer_windows(keys, lambda layer: layer >= num_full_layers)
