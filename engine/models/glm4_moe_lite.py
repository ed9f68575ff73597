"""GLM-4.7-Flash: the network of DeepSeek V3."""

from __future__ import annotations

from engine.models.deepseek_v3 import DeepseekV3


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
