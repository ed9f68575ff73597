"""Phi-3, Phi-3.5 and Phi-4: packed projections and LongRoPE. Phi-4-mini rotates only a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import Attention, AttentionOptions
from engine.models.config import DecoderConfig, layer_windows, read_decoder
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.layers import LayerScope
from engine.models.mlp import GatedMlp
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Phi3(DecoderConfig):
    """Configuration of a Phi-3, Phi-3.5 or Phi-4 model."""

    rotates_partly = True

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Phi3:
        windows = layer_windows(keys, lambda layer: keys.get("sliding_window") is not None)
        return read_decoder(cls, {"rms_norm_eps": 1e-5, **keys}, {"windows": windows})

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        options = AttentionOptions(packed="self_attn.qkv_proj", window=self.window(scope.layer))
        mlp = GatedMlp.of(self, scope, packed="mlp.gate_up_proj")
        return DecoderLayer.of(self, scope, (Attention.of(self, scope, options), mlp))
