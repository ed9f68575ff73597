"""Mistral Small 4: the network of DeepSeek V3 with softmax scores and no bias of the choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.deepseek import DeepseekV2
from engine.models.mixture_config import mistral_mixture

YARN = {"rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


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
        return super().read(keys if has_rope else {**keys, "rope_parameters": YARN})
