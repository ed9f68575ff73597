"""DeepSeek V2 and V3, and models of the same network: latent attention in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import read_decoder
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.experts import mlp_of
from engine.models.latent_attention import LatentAttention, LatentOptions, read_latent, with_rotated_dim
from engine.models.layers import LayerScope
from engine.models.mixture_config import deepseek_mixture, mistral_mixture, softmax_mixture
from engine.models.mtp import DEEPSEEK, MtpFamily
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class DeepseekV2(MtpFamily):
    """Configuration of a DeepSeek V2 model."""

    latent: LatentOptions
    mlp_bias: bool
    mixture_of = staticmethod(softmax_mixture)

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> DeepseekV2:
        latent = read_latent(keys)
        own = {
            "latent": latent,
            "mixture": cls.mixture_of(keys) if keys.get("n_routed_experts") else None,
            "has_rotary_pairs": bool(keys.get("rope_interleave", True)),
            "mlp_bias": bool(keys.get("mlp_bias")),
        }
        return read_decoder(cls, with_rotated_dim(keys, latent), own)

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self.layer)

    def layer(self, scope: LayerScope) -> DecoderLayer:
        parts = LatentAttention.of(self, scope, self.latent), mlp_of(self, scope, self.mlp_bias)
        return DecoderLayer.of(self, scope, parts)


class DeepseekV3(DeepseekV2):
    """Configuration of a DeepSeek V3 or R1 model, and of Kimi K2 and GLM-4.7-Flash."""

    mixture_of = staticmethod(deepseek_mixture)
    mtp_layout = DEEPSEEK


class Mistral4(DeepseekV2):
    """Configuration of a Mistral Small 4 model."""

    mixture_of = staticmethod(mistral_mixture)
