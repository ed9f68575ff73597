"""Mistral, Ministral and Ministral 3: like Llama without biases; none, some or all layers have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.models.attention import Attention, AttentionOptions
from engine.models.config import DecoderConfig, layer_windows, read_decoder
from engine.models.config_fields import an_object, whole_number
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.experts import mlp_of
from engine.models.layers import LayerScope
from engine.models.weights import Shard

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


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


class Ministral3(Mistral):
    """Configuration of a Ministral 3 model, up to the length from which on it scales queries by their position."""

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Mistral:
        scaling = {**an_object(keys, "rope_scaling"), **an_object(keys, "rope_parameters")} or YARN
        config = super().read({"rms_norm_eps": 1e-5, "sliding_window": None, **keys, "rope_parameters": scaling})
        if not scaling.get("llama_4_scaling_beta"):
            return config
        return replace(config, max_position_embeddings=whole_number(scaling, "original_max_position_embeddings"))
