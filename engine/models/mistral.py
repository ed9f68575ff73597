"""Mistral: Llama without biases, whose layers look back over a window unless config.json takes it away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import DecoderConfig, read_decoder, sliding_window
from engine.models.decoder import Attention, Decoder, DecoderLayer, GatedMlp
from engine.models.layers import Place
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Mistral(DecoderConfig):
    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Mistral:
        # All layers have the window: use_sliding_window is not one of its keys.
        return read_decoder(cls, keys, sliding_window=sliding_window(keys, by_default=True))

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, place: Place) -> DecoderLayer:
        return DecoderLayer.of(self, place, Attention.of(self, place), GatedMlp.of(self, place))
