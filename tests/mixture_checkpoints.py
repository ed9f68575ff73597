"""Small random checkpoints of the families with mixtures of experts: their config.json, and their tensors under the
names and in the shapes of released checkpoints. They have negative biases of the choice of experts, several groups of
experts, dense layers between those with experts, and heads whose size is not hidden_size / num_attention_heads."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

WINDOW = 128
ROUTED = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
DEEPSEEK = {**ROUTED, "first_k_dense_replace": 1, "n_routed_experts": 8, "norm_topk_prob": True}
QWEN3_5_MOE = {
    **ROUTED,
    "full_attention_interval": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "shared_expert_intermediate_size": 72,
}
# Experts are in one tensor
STACKED = ("gpt_oss", "granitemoe", "mistral4", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl_moe")
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "head_dim": 24,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen3_moe": {
        **ROUTED,
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 32,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_hidden_layers": 3,
        "use_sliding_window": False,
    },
    "qwen2_moe": {
        **ROUTED,
        "architectures": ["Qwen2MoeForCausalLM"],
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
        "num_experts": 6,
        "shared_expert_intermediate_size": 72,
        "use_sliding_window": False,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "intermediate_size": 40,
        "norm_topk_prob": False,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 2,
    },
    "ernie4_5_moe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "head_dim": 20,
        "moe_intermediate_size": 40,
        "moe_k": 3,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 8,
        "moe_num_shared_experts": 2,
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 24,
        "intermediate_size": 48,
        "num_experts_per_tok": 3,
        "num_local_experts": 6,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        "sliding_window": WINDOW,
    },
    "glm4_moe": {
        **DEEPSEEK,
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "head_dim": 24,
        "n_group": 4,
        "n_shared_experts": 1,
        "num_hidden_layers": 3,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.5,
        "topk_group": 2,
        "use_qk_norm": True,
    },
    "minimax_m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": 32,
        "intermediate_size": 40,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 2,
        "num_local_experts": 8,
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "granitemoe": {
        "architectures": ["GraniteMoeForCausalLM"],
        "attention_bias": True,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 2.0,
        "intermediate_size": 40,
        "logits_scaling": 0.5,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 2,
        "num_local_experts": 6,
        "residual_multiplier": 0.6,
    },
    "qwen3_next": {
        **ROUTED,
        "architectures": ["Qwen3NextForCausalLM"],
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "mlp_only_layers": [2],
        "num_experts": 8,
        "partial_rotary_factor": 0.25,
        "shared_expert_intermediate_size": 72,
    },
    "qwen3_5_moe_text": {**QWEN3_5_MOE, "architectures": ["Qwen3_5MoeForCausalLM"]},
    "dots1": {
        **DEEPSEEK,
        "architectures": ["Dots1ForCausalLM"],
        "head_dim": 24,
        "n_group": 2,
        "n_shared_experts": 2,
        "num_hidden_layers": 3,
        "routed_scaling_factor": 2.5,
        "sliding_window": None,
        "topk_group": 1,
    },
}


def as_released(model_type: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors as released checkpoints have them: the experts of some families are in one tensor."""
    if model_type == "ernie4_5_moe":
        is_bias = "e_score_correction_bias"
        return {name: each[None] if is_bias in name else each for name, each in tensors.items()}
    if model_type not in STACKED:
        return tensors
    of_experts: dict[str, list[np.ndarray]] = {}
    made = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: _natural(item[0])):
        if found := re.fullmatch(r"(.*)\.experts\.\d+\.(gate|up|down)_proj\.(\w+)", name):
            of_experts.setdefault(".".join(found.groups()), []).append(tensor)
        else:
            made[name] = tensor
    for key, down in of_experts.items():
        block, kind, end = key.rsplit(".", 2)
        if kind != "down":
            continue
        gates, ups = (np.stack(of_experts[f"{block}.{each}.{end}"]) for each in ("gate", "up"))
        if model_type == "granitemoe":
            made[f"{block}.input_linear.weight"] = np.concatenate([gates, ups], axis=1)
            made[f"{block}.output_linear.weight"] = np.stack(down)
        elif model_type != "gpt_oss":
            turn = (0, 2, 1) if model_type == "qwen3_vl_moe" else (0, 1, 2)
            made[f"{block}.experts.gate_up_proj"] = np.concatenate([gates, ups], axis=1).transpose(turn)
            made[f"{block}.experts.down_proj"] = np.stack(down).transpose(turn)
        else:
            by_turns = np.stack([gates, ups], axis=2).reshape(len(gates), -1, *gates.shape[2:])
            suffix, turn = ("", (0, 2, 1)) if end == "weight" else ("_bias", (0, 1))
            made[f"{block}.experts.gate_up_proj{suffix}"] = by_turns.transpose(turn)
            made[f"{block}.experts.down_proj{suffix}"] = np.stack(down).transpose(turn)
    return {name: np.ascontiguousarray(tensor) for name, tensor in made.items()}


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
