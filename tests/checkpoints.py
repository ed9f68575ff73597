"""Small random Hugging Face checkpoints, made from a seed with numpy alone.

The weights are scaled so that greedy output wanders instead of repeating one token: layers outweigh the embedding
in the residual, and the output projection spreads the logits by a few units.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.byte_tokenizer import EOS_ID, write_tokenizer

COMMON = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 150,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "torch_dtype": "float32",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 72,  # a head of 18: no power of two, no multiple of four
        "num_hidden_layers": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "llama3": {  # everything llama can have: biases, scaled positions, a head that is not hidden / heads
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 20,
        "hidden_size": 66,
        "num_attention_heads": 6,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "rope_theta": 10000.0,
        "use_sliding_window": False,
        "sliding_window": 128,
        "tie_word_embeddings": True,
    },
    "qwen2_untied": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 32,
        "num_hidden_layers": 3,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "mistral": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "ernie4_5": {
        "model_type": "ernie4_5",
        "architectures": ["Ernie4_5ForCausalLM"],
        "head_dim": 20,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
}
# Of a dozen, the seeds with varied greedy output and no two logits at the top closer than 0.004 (tests/golden).
SEEDS = {"llama": 7, "llama3": 7, "qwen2": 6, "qwen2_untied": 7, "qwen3": 4, "mistral": 6, "ernie4_5": 0}


def make_checkpoint(directory: Path, family: str, seed: int | None = None, **overrides: Any) -> Path:
    """Write config.json, model.safetensors and a byte tokenizer. `overrides` are keys of config.json."""
    seed = SEEDS[family] if seed is None else seed
    directory.mkdir(parents=True, exist_ok=True)
    config = {**COMMON, **FAMILIES[family], "bos_token_id": EOS_ID, "eos_token_id": EOS_ID, **overrides}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tensors(directory / "model.safetensors", dict(random_tensors(config, seed)), config["torch_dtype"])
    write_tokenizer(directory)
    return directory


def random_tensors(config: dict[str, Any], seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Return every tensor of the family in float32, one after another from one random stream."""
    rng = np.random.default_rng(seed)
    for name, (shape, scale, offset) in tensor_list(config).items():
        yield name, (offset + scale * rng.standard_normal(shape, np.float32)).astype(np.float32)


def tensor_list(config: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], float, float]]:
    """Return shape, standard deviation and mean of each tensor."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tied = config["tie_word_embeddings"]
    tensors = {"model.embed_tokens.weight": ((vocab, hidden), 0.5 if tied else 1.0, 0.0)}
    for i in range(config["num_hidden_layers"]):
        for name, tensor in _layer_tensors(config).items():
            tensors[f"model.layers.{i}.{name}"] = tensor
    tensors["model.norm.weight"] = ((hidden,), 0.1, 1.0)
    if not tied:
        tensors["lm_head.weight"] = ((vocab, hidden), 0.5, 0.0)
    return tensors


def _layer_tensors(config: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], float, float]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = (config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    qkv_bias = config["model_type"] == "qwen2" or config.get("attention_bias", config.get("use_bias", False))
    o_bias = config["model_type"] != "qwen2" and qkv_bias
    mlp_bias = config.get("mlp_bias", config.get("use_bias", False))
    linears = {  # rows, columns, bias, gain
        "self_attn.q_proj": (heads, hidden, qkv_bias, 1.5),
        "self_attn.k_proj": (kv_heads, hidden, qkv_bias, 1.5),
        "self_attn.v_proj": (kv_heads, hidden, qkv_bias, 2.0),
        "self_attn.o_proj": (hidden, heads, o_bias, 2.0),
        "mlp.gate_proj": (inner, hidden, mlp_bias, 1.5),
        "mlp.up_proj": (inner, hidden, mlp_bias, 1.5),
        "mlp.down_proj": (hidden, inner, mlp_bias, 2.0),
    }
    tensors = {
        "input_layernorm.weight": ((hidden,), 0.1, 1.0),
        "post_attention_layernorm.weight": ((hidden,), 0.1, 1.0),
    }
    for name, (rows, columns, has_bias, gain) in linears.items():
        tensors[f"{name}.weight"] = ((rows, columns), gain / columns**0.5, 0.0)
        if has_bias:
            tensors[f"{name}.bias"] = ((rows,), 0.5, 0.0)
    if config["model_type"] == "qwen3":
        tensors["self_attn.q_norm.weight"] = tensors["self_attn.k_norm.weight"] = ((head_dim,), 0.1, 1.0)
    return tensors


def write_tensors(path: Path, tensors: dict[str, np.ndarray], dtype: str = "float32") -> None:
    """Write a safetensors file. `dtype` is float32, float16 or bfloat16, to which values are cut off, not rounded."""
    num_bytes = 4 if dtype == "float32" else 2
    name_of = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.size * num_bytes
        header[name] = {"dtype": name_of[dtype], "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            stored = tensor.view(np.uint32) >> 16 if dtype == "bfloat16" else tensor
            file.write(stored.astype("<u2" if dtype == "bfloat16" else dtype).tobytes())


def write_shards(directory: Path, tensors: dict[str, np.ndarray], num_shards: int) -> None:
    """Write the tensors to several files with an index, as large checkpoints have them."""
    names = list(tensors)
    weight_map = {}
    for i in range(num_shards):
        file_name = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        shard = {name: tensors[name] for name in names[i::num_shards]}
        write_tensors(directory / file_name, shard)
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
