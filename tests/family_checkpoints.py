"""Small random checkpoints of the families whose layers differ from Llama's, made from a seed with numpy alone.

The tensors are those that the network of the family asks for: transformers refuses them where a name or shape is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.models import support
from engine.models.families import read_model
from engine.models.formats import FLOAT32
from engine.models.weights import Shard, weights_of
from tests.byte_tokenizer import EOS_ID, write_tokenizer
from tests.checkpoints import write_tensors
from tests.mixture_checkpoints import MIXTURES, QWEN3_5_MOE, as_released
from tests.vision_checkpoints import VISION_FAMILIES, as_stored, write_processor

WINDOW = 128
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 150,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 320,
}
DRAFTS, READS_IMAGES = "mtp.fc.weight", "model.visual.merger.linear_fc1.weight"
OTHER_PARTS = {  # tensors of the parts of a checkpoint that draft tokens and read images
    **dict.fromkeys(("qwen3_5", "qwen3_next"), (DRAFTS,)),
    "qwen3_5_moe": (DRAFTS, READS_IMAGES),
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]}
LATENT = {
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "q_lora_rank": 40,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.6,
}
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {
        "architectures": ["GemmaForCausalLM"],
        "hidden_act": "gelu_pytorch_tanh",
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 32,
        "num_hidden_layers": 6,
        "query_pre_attn_scalar": 20,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "tie_word_embeddings": True,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "num_key_value_heads": 4},
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "rope_theta": 500000.0,
        "sliding_window": WINDOW,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "sliding_window": WINDOW, "pad_token_id": 0},
    "phi3_long": {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", **FACTORS},
        "pad_token_id": 0,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": True,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 2.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.6,
    },
    "glm": {"architectures": ["GlmForCausalLM"], "head_dim": 24, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "head_dim": 24, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "no_rope_layers": [1, 1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "pad_token_id": 0,
    },
    "starcoder2": {
        "architectures": ["Starcoder2ForCausalLM"],
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
        "use_bias": True,
    },
    "arcee": {"architectures": ["ArceeForCausalLM"], "hidden_act": "relu2", "mlp_bias": True, "attention_bias": True},
    "nemotron": {
        "architectures": ["NemotronForCausalLM"],
        "head_dim": 24,
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    "seed_oss": {"architectures": ["SeedOssForCausalLM"], "head_dim": 20, "attention_bias": True},
    "exaone4": {
        "architectures": ["Exaone4ForCausalLM"],
        "head_dim": 24,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "internlm3": {
        "architectures": ["InternLM3ForCausalLM"],
        "bias": False,
        "head_dim": 16,
        "qkv_bias": False,
        "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
    },
    "ministral": {
        "architectures": ["MinistralForCausalLM"],
        "head_dim": 24,
        "layer_types": ALTERNATING,
        "sliding_window": WINDOW,
    },
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "head_dim": 24,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "hunyuan_v1_dense": {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "head_dim": 24,
        "pad_token_id": 0,
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
    },
    "qwen3_5_text": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "text_config": {**COMMON, **QWEN3_5_MOE, "model_type": "qwen3_5_moe_text", "num_experts": 8},
    },
    "mistral_window": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": WINDOW,
    },
    "deepseek_v2": {
        **LATENT,
        "architectures": ["DeepseekV2ForCausalLM"],
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "topk_method": "group_limited_greedy",
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        **LATENT,
        "architectures": ["DeepseekV3ForCausalLM"],
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.6},
    },
    "deepseek_v2_greedy": {
        **LATENT,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "norm_topk_prob": False,
        "topk_method": "greedy",
    },
    "kimi_k2": {
        **LATENT,
        "n_group": 1,
        "topk_group": 1,
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": True,
        "rope_interleave": False,
    },
    "glm4_moe_lite": {
        **LATENT,
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "qk_nope_head_dim": 12,
        "v_head_dim": 32,
    },
    "mistral4": {
        **LATENT,
        "architectures": ["Mistral4ForCausalLM"],
        "pad_token_id": 0,
        "rope_parameters": {
            **YARN,
            "rope_theta": 10000.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "qwen2_window": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "max_window_layers": 2,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
    },
}
ALL = FAMILIES | MIXTURES | VISION_FAMILIES
CPU_ONLY = {each.model_type for each in support.FAMILIES if not each.runs_on_gpus}
ON_GPUS = [name for name, keys in ALL.items() if keys.get("model_type", name) not in CPU_ONLY]
# Blocks of each cache group, so few that requests are preempted, where 20 are enough.
FEW_BLOCKS = dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"), 18)
# Of five, those with varied greedy output and no close call between the two likeliest tokens (tests/golden).
SEEDS: dict[str, int] = {
    "gemma": 1,
    "gemma2": 4,
    "gemma3_text": 3,
    "olmo2": 4,
    "olmo3": 0,
    "phi3": 3,
    "phi3_long": 2,
    "granite": 1,
    "glm": 3,
    "glm4": 3,
    "qwen3_5_text": 3,
    "smollm3": 4,
    "seed_oss": 4,
    "exaone4": 0,
    "internlm3": 0,
    "ministral": 4,
    "ministral3": 1,
    "hunyuan_v1_dense": 2,
    "starcoder2": 1,
    "arcee": 1,
    "nemotron": 4,
    "mistral_window": 1,
    "qwen2_window": 0,
    "deepseek_v2": 2,
    "deepseek_v2_greedy": 0,
    "deepseek_v3": 3,
    "kimi_k2": 2,
    "glm4_moe_lite": 4,
    "mistral4": 0,
    "mixtral": 3,
    "qwen3_moe": 3,
    "qwen2_moe": 2,
    "olmoe": 1,
    "ernie4_5_moe": 2,
    "gpt_oss": 0,
    "glm4_moe": 1,
    "minimax_m2": 4,
    "granitemoe": 4,
    "dots1": 4,
    "qwen3_5_moe": 1,
    "qwen3_5_moe_text": 0,
    "qwen3_next": 3,
    "paddleocr_vl": 0,
    "qwen2_5_vl": 1,
    "qwen3_vl": 2,
    "qwen3_vl_moe": 1,
    "qwen3_5": 4,
}


def prompt_lens(family: str) -> tuple[int, ...]:
    """Return the lengths of the prompts that the family is compared with. LongRoPE in transformers changes in the
    middle of a short one's answer."""
    if family.startswith(("qwen3_5", "qwen3_next")):
        return (1, 63, 64, 65, 127, 128, 129, 200)
    return (1, 24, 127, 128, 129, 200)[2 * (family == "phi3_long") :]


def config_of(family: str, **overrides: Any) -> dict[str, Any]:
    return {"model_type": family, **COMMON, "bos_token_id": EOS_ID, "eos_token_id": EOS_ID} | ALL[family] | overrides


def make_checkpoint(directory: Path, family: str, seed: int | None = None, **overrides: Any) -> Path:
    """Write config.json, model.safetensors and a byte tokenizer; `overrides` are keys of config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    config = config_of(family, **overrides)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    seed = SEEDS.get(family, 0) if seed is None else seed
    tensors = as_released(config["model_type"], dict(random_tensors(config, seed)))
    write_tensors(directory / "model.safetensors", tensors)
    write_tokenizer(directory)
    write_processor(directory, config["model_type"])
    return directory


def random_tensors(config: dict[str, Any], seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor of the family, float32, one after another from one random stream."""
    rng = np.random.default_rng(seed)
    networks = read_model(config).networks(Shard(FLOAT32, "float32", block_size=64)).values()
    weights = [weight for network in networks for weight in weights_of(network).values()]
    shapes = {part.tensor: part.shape for weight in weights for part in weight.parts}
    offsets = {part.tensor: weight.offset for weight in weights for part in weight.parts}
    for name, shape in sorted(shapes.items()):
        scale, mean = _distribution(name, shape, config)
        values = mean - offsets[name] + scale * rng.standard_normal(shape, np.float32)
        stored = re.sub(r"^model\.", "model.language_model.", name) if "text_config" in config else name
        yield as_stored(config, stored, values.astype(np.float32))
    for name in OTHER_PARTS.get(config["model_type"], ()):
        yield name, np.ones(8, np.float32)


def _distribution(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> tuple[float, float]:
    """Return the standard deviation and the mean of a tensor."""
    if name.endswith(".bias"):
        return 0.3, 0.0
    if name.endswith("correction_bias"):
        return 0.1, -0.3
    if name.endswith("sinks"):
        return 1.0, 0.0
    is_gemma = "gemma" in config["model_type"]  # which multiplies embeddings
    if "norm" in name or "ln_q" in name:
        return 0.1, 6.0 if is_gemma and name == "model.norm.weight" else 1.0
    if "embed_tokens" in name:
        return (0.05 if is_gemma else 0.5) if config["tie_word_embeddings"] else 1.0, 0.0
    if name.endswith(("A_log", "dt_bias", "conv1d.weight")):
        return 0.5, 0.0
    if "lm_head" in name:
        return 0.5, 0.0
    is_output = any(part in name for part in ("o_proj", "down_proj", "c_proj", ".w2."))
    return (2.0 if is_output else 1.6) / shape[1] ** 0.5, 0.0
