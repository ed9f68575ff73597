"""Random checkpoints of named shapes: `python -m benchmarks.random_checkpoint SHAPE OUT_DIR`.

Weights are bfloat16 bits of small normal numbers. The tokenizer is the demo model's. Token ids beyond its vocabulary
have no text, which a benchmark on token ids does not need.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from engine.models.families import read_model
from engine.models.formats import FLOAT32
from engine.models.weights import Shard, weights_of

DEMO_MODEL = Path(__file__).resolve().parent.parent / "demo_model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
MATRIX = 2  # axes
QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
QWEN3_MOE = {**QWEN2, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
TINY = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
GLM_MIXTURE = {  # with an MTP layer
    **QWEN2,
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": False,
    "num_nextn_predict_layers": 1,
}
TINY_MIXTURE = {**TINY, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4, "head_dim": 32}
ATTENTION_0_2B = {
    **QWEN2,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
LLAMA3 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
QWEN3_5 = {
    **QWEN2,
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 248320,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
}
DEEPSEEK_V2 = {
    **LLAMA3,
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": QWEN2
    | {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": QWEN2
    | {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": QWEN2
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "llama-3-8b": LLAMA3
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3-70b": LLAMA3
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "qwen3-moe-0.8b": QWEN3_MOE
    | {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 11,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": QWEN3_MOE
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "qwen3.5-0.8b": QWEN3_5
    | {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3.5-9b": QWEN3_5
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
    },
    "qwen3.5-27b": QWEN3_5
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "qwen3.5-35b-a3b": QWEN3_5
    | {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
    },
    "mixtral-8x7b": LLAMA3
    | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rope_theta": 1e6,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt-oss-20b": LLAMA3
    | {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "head_dim": 64,
        "sliding_window": 128,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "deepseek-v2-lite": DEEPSEEK_V2
    | {
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
    },
    "deepseek-v2-0.7b": DEEPSEEK_V2
    | {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "moe_intermediate_size": 512,
        "n_routed_experts": 32,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 12,
        "q_lora_rank": 512,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    "paddleocr-vl": {
        "model_type": "paddleocr_vl",
        "architectures": ["PaddleOCRVLForConditionalGeneration"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 103424,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "image_token_id": 100295,
        "vision_start_token_id": 101305,
        "vision_end_token_id": 101306,
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 384,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
        },
    },
    "glm-moe-0.6b": GLM_MIXTURE
    | {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 11,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
    "attention-0.2b": ATTENTION_0_2B,
    "hybrid-0.2b": ATTENTION_0_2B  # three layers of Gated DeltaNet before each layer of attention
    | {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "tiny": QWEN2 | TINY,
    "tiny-glm-moe": GLM_MIXTURE | TINY_MIXTURE | {"n_routed_experts": 16, "tie_word_embeddings": False},
    "tiny-moe": QWEN3_MOE | TINY_MIXTURE,
    "tiny-hybrid": QWEN3_MOE  # three layers of Gated DeltaNet and one of attention, all with mixtures of experts
    | TINY_MIXTURE
    | {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "partial_rotary_factor": 0.25,
        "shared_expert_intermediate_size": 128,
    },
    "qwen2.5-vl-3b": QWEN2
    | {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
    "tiny-vl": QWEN2  # reads images
    | TINY
    | {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vocab_size": 2056,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "vision_start_token_id": 2048,
        "image_token_id": 2049,
        "vision_end_token_id": 2050,
        "vision_config": {
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": 256,
            "window_size": 112,
            "fullatt_block_indexes": [1, 3],
        },
    },
}
VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")  # with the ids of tiny-vl
VISION_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tensors_of(config: dict) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the model that this config.json describes, by its name."""
    networks = read_model(config).networks(Shard(FLOAT32, "float32", block_size=64)).values()
    weights = [weight for network in networks for weight in weights_of(network).values()]
    return {part.tensor: part.shape for weight in weights for part in weight.parts}


def random_bits(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> bytes:
    """Return the tensor's bytes in bfloat16, truncated from float32. Norms are ones. Matrices keep the size of what
    they are multiplied with, so that answers vary; states of Gated DeltaNet decay slowly."""
    values = rng.standard_normal(shape, np.float32)
    values *= 1.2 / shape[1] ** 0.5 if len(shape) == MATRIX else 0.1
    if "norm" in name:
        values[:] = 1
    if name.endswith("A_log"):
        values -= 3
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], bits: Callable[[str, tuple], bytes]) -> None:
    """Write a file in the safetensors format: length of the header, the header as JSON, then the tensors. Only one
    tensor is in memory at a time."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            file.write(bits(name, shape))


def make_checkpoint(shape: str, out: Path, seed: int = 0) -> Path:
    """Write a checkpoint of random weights to `out`, unless it contains a checkpoint already. Return `out`."""
    if (out / "config.json").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    write_safetensors(out / "model.safetensors", tensors_of(SHAPES[shape]), lambda *tensor: random_bits(rng, *tensor))
    return write_shape(shape, out)


def write_shape(shape: str, out: Path) -> Path:
    """Write a checkpoint without weights, for LOAD_FORMAT=dummy, unless `out` contains one already. Return `out`."""
    if not (out / "config.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        for name in TOKENIZER_FILES:
            shutil.copy(DEMO_MODEL / name, out / name)
        if "vision_config" in SHAPES[shape]:
            add_vision_tokens(out)
        (out / "config.json").write_text(json.dumps(SHAPES[shape], indent=1))
    return out


def add_vision_tokens(out: Path) -> None:
    """Add the tokens, the chat template and the limits of pixels of a model that reads images."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in VISION_TOKENS])
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(VISION_TEMPLATE)
    (out / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 28**2, "max_pixels": 280**2}))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        sys.exit(f"usage: python -m benchmarks.random_checkpoint {{{','.join(SHAPES)}}} OUT_DIR")
    print(make_checkpoint(sys.argv[1], Path(sys.argv[2])))
