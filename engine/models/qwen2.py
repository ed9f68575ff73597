"""Qwen2 and Qwen2.5: biases of queries, keys and values; with use_sliding_window the upper layers have a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import DecoderConfig, read_decoder, sliding_window
from engine.models.decoder import Attention, Decoder, DecoderLayer, GatedMlp
from engine.models.keys import whole_number
from engine.models.layers import Place
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Qwen2(DecoderConfig):
    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Qwen2:
        return read_decoder(cls, keys, sliding_window=upper_window(keys))

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, place: Place) -> DecoderLayer:
        return DecoderLayer.of(self, place, Attention.of(self, place, qkv_bias=True), GatedMlp.of(self, place))


def upper_window(keys: Mapping[str, Any]) -> int | None:
    """The first max_window_layers see everything, those above only sliding_window tokens. 0, all above, is allowed."""
    if not keys.get("use_sliding_window"):
        return sliding_window(keys, by_default=False)
    num_full_layers = 0 if keys.get("max_window_layers") == 0 else whole_number(keys, "max_window_layers", 28)
    return sliding_window(keys, by_default=num_full_layers < whole_number(keys, "num_hidden_layers"))
