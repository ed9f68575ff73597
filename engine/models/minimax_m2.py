"""MiniMax-M2: a mixture of experts in every layer; one norm of all queries together and one of all keys."""

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
from engine.ops.catalogue_experts import SIGMOID


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2(DecoderConfig):
    """Configuration of a MiniMax-M2 model."""

    rotates_partly = True

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> MiniMaxM2:
        refuse_other_values(keys, scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True)
        refuse_other_values(keys, qk_norm_type="per_layer", shared_intermediate_size=0)
        head_dim = whole_number(keys, "head_dim", 128)
        given = {"num_key_value_heads": 8, "rope_theta": 5000000.0, **keys}
        if "partial_rotary_factor" not in given and given.get("rotary_dim") is not None:
            given["partial_rotary_factor"] = whole_number(given, "rotary_dim") / head_dim
        mixture = MixtureConfig(
            num_experts=num_experts(keys, 256),
            intermediate_size=whole_number(keys, "intermediate_size"),
            layers=mixture_layers(keys),
            routing=Routing(top_k=whole_number(keys, "num_experts_per_tok", 8), scoring=SIGMOID, renormalize=1),
            block="block_sparse_moe",
            choice_bias="e_score_correction_bias",
            projections=("w1", "w3", "w2"),
        )
        return read_decoder(cls, given, {"mixture": mixture}, head_dim=128)

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        attention = Attention.of(self, scope, AttentionOptions(norms=WIDE))
        return DecoderLayer.of(self, scope, (attention, mlp_of(self, scope)))
