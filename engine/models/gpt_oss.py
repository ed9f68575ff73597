"""gpt-oss: mixtures of experts with biases and a clamped SwiGLU; attention sinks; every other layer has a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import Attention, AttentionOptions
from engine.models.config import DecoderConfig, layer_windows, read_decoder
from engine.models.config_fields import number, whole_number
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.experts import mlp_of
from engine.models.layers import LayerScope
from engine.models.mixture_config import Activation, MixtureConfig, Routing, mixture_layers, num_experts
from engine.models.weights import Shard
from engine.ops.catalogue_experts import SOFTMAX_OF_CHOSEN

YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 4096}


@dataclass(frozen=True, kw_only=True)
class GptOss(DecoderConfig):
    """Configuration of a gpt-oss model."""

    attention_bias: bool

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> GptOss:
        given = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128, **keys}
        if not (given.get("rope_scaling") or given.get("rope_parameters")):
            given |= {"rope_parameters": YARN}
        limit, alpha = number(keys, "swiglu_limit", 7.0), number(keys, "swiglu_alpha", 1.702)
        mixture = MixtureConfig(
            num_experts=num_experts(keys, 128),
            intermediate_size=whole_number(keys, "intermediate_size"),
            layers=mixture_layers(keys),
            routing=Routing(top_k=whole_number(keys, "num_experts_per_tok", 4), scoring=SOFTMAX_OF_CHOSEN),
            activation=Activation(limit=limit, alpha=alpha, offset=1.0),
            router="router",
            has_bias=True,
        )
        windows = layer_windows(given, lambda layer: layer % 2 == 0)
        own = {"attention_bias": bool(keys.get("attention_bias", True)), "windows": windows, "mixture": mixture}
        return read_decoder(cls, given, own, head_dim=64)

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        bias, window = self.attention_bias, self.window(scope.layer)
        attention = Attention.of(self, scope, AttentionOptions(bias, bias, window=window, has_sinks=True))
        return DecoderLayer.of(self, scope, (attention, mlp_of(self, scope)))
