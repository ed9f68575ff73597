"""DeepSeek V2: latent attention in every layer, and mixtures of experts with softmax scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.models.config import read_decoder
from engine.models.config_fields import ModelError
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.experts import mlp_of
from engine.models.latent_attention import LatentAttention, LatentOptions, read_latent, with_rotated_dim
from engine.models.layers import LayerScope
from engine.models.mixture_config import EXPERTS, softmax_mixture
from engine.models.mtp import MtpFamily
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class DeepseekV2(MtpFamily):
    """Configuration of a DeepSeek V2 model."""

    latent: LatentOptions
    mlp_bias: bool
    mixture_of = staticmethod(softmax_mixture)
    defaults: ClassVar[Mapping[str, Any]] = {  # those of transformers for missing keys
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "q_lora_rank": 1536,
    }

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> DeepseekV2:
        keys = {**cls.defaults, **keys}
        latent = read_latent(keys)
        mixture = cls.mixture_of(keys) if any(keys.get(name) for name in EXPERTS) else None
        if keys.get("mlp_bias") and mixture and mixture.shared:
            raise ModelError(f"config.json: mlp_bias is {keys['mlp_bias']!r}, supported with shared experts is false")
        own = {
            "latent": latent,
            "mixture": mixture,
            "has_rotary_pairs": bool(keys.get("rope_interleave", True)),
            "mlp_bias": bool(keys.get("mlp_bias")),
        }
        return read_decoder(cls, with_rotated_dim(keys, latent), own)

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self.layer)

    def layer(self, scope: LayerScope) -> DecoderLayer:
        parts = LatentAttention.of(self, scope, self.latent), mlp_of(self, scope, self.mlp_bias)
        return DecoderLayer.of(self, scope, parts)
