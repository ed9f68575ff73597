"""DeepSeek V3 and R1, and Kimi K2: the network of DeepSeek V2 with sigmoid scores and a bias of the choice."""

from __future__ import annotations

from engine.models.deepseek import DeepseekV2
from engine.models.mixture_config import deepseek_mixture
from engine.models.mtp import DEEPSEEK


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
