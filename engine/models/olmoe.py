"""OLMoE: like Llama with a mixture of experts in every layer; one norm of all queries together and one of all keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import WIDE, Attention, AttentionOptions
from engine.models.config import DecoderConfig, read_decoder
from engine.models.config_fields import whole_number
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.experts import mlp_of
from engine.models.layers import LayerScope
from engine.models.mixture_config import MixtureConfig, Routing, mixture_layers, num_experts, refuse_other_values
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Olmoe(DecoderConfig):
    """Configuration of an OLMoE model."""

    attention_bias: bool

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Olmoe:
        refuse_other_values(keys, clip_qkv=None)
        routing = Routing(
            top_k=whole_number(keys, "num_experts_per_tok", 8), renormalize=int(bool(keys.get("norm_topk_prob")))
        )
        mixture = MixtureConfig(
            num_experts=num_experts(keys, 64),
            intermediate_size=whole_number(keys, "intermediate_size"),
            layers=mixture_layers(keys),
            routing=routing,
        )
        own = {"attention_bias": bool(keys.get("attention_bias")), "mixture": mixture}
        return read_decoder(cls, {"rms_norm_eps": 1e-5, **keys}, own)

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        attention = Attention.of(self, scope, AttentionOptions(self.attention_bias, self.attention_bias, norms=WIDE))
        return DecoderLayer.of(self, scope, (attention, mlp_of(self, scope)))
