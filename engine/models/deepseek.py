"""DeepSeek V2 and V3, and models of the same network: latent attention in every layer."""

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
from engine.models.mixture_config import EXPERTS, deepseek_mixture, mistral_mixture, softmax_mixture
from engine.models.mtp import DEEPSEEK, MtpFamily
from engine.models.weights import Shard

MISTRAL4_YARN = {"rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192}
MISTRAL4_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


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


class DeepseekV3(DeepseekV2):
    """Configuration of a DeepSeek V3 or R1 model, and of Kimi K2."""

    mixture_of = staticmethod(deepseek_mixture)
    defaults = {
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    }
    mtp_layout = DEEPSEEK


class Glm4MoeLite(DeepseekV3):
    """Configuration of a GLM-4.7-Flash model."""

    defaults = {
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "q_lora_rank": 768,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
    }


class Mistral4(DeepseekV2):
    """Configuration of a Mistral Small 4 model."""

    mixture_of = staticmethod(mistral_mixture)
    defaults = {
        "moe_intermediate_size": 2048,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "q_lora_rank": 1024,
    }

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> DeepseekV2:
        has_rope = keys.get("rope_scaling") or keys.get("rope_parameters")
        return super().read(keys if has_rope else {**keys, "rope_parameters": MISTRAL4_YARN})
