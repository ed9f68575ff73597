"""Converts a GGUF file to the config.json and the names of tensors that transformers has for the model.

llama.cpp interleaves the rotary pairs of Llama's queries and keys, and adds 1 to the norms of Gemma; both are undone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.models.config_fields import ModelError
from engine.models.gguf import Gguf, GgufTensor
from engine.models.stored_tensors import StoredTensor

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}
MIXTURES = {"qwen3moe": "qwen3_moe"}  # architectures whose layers have experts
MODEL_TYPES |= MIXTURES
TABLE, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
OUTSIDE = {TABLE: "model.embed_tokens.weight", HEAD: "lm_head.weight", "output_norm.weight": "model.norm.weight"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
IN_GEMMA_LAYER = IN_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
IN_MIXTURE_LAYER = IN_LAYER | {"ffn_gate_inp": "mlp.gate"}
EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
KEYS = {  # config.json -> metadata, after the name of the architecture
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Gemma's 27B models, by family and number of layers, scale queries by the width per head instead of the head's size.
WIDE_QUERIES = {("gemma2", 46), ("gemma3", 62)}


def read_gguf(paths: list[Path]) -> tuple[dict[str, Any], dict[str, StoredTensor], Mapping[str, Any]]:
    """Return the config.json, the tensors by their names in transformers, and the metadata of the files of a model.

    Raises ModelError if the architecture is not supported, or if values are missing or have other types.
    """
    try:
        return _read(paths)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{paths[0]} has metadata or tensors that cannot be used: {error!r}") from error


def _read(paths: list[Path]) -> tuple[dict[str, Any], dict[str, StoredTensor], Mapping[str, Any]]:
    files = [Gguf.read(path) for path in paths]
    metadata = files[0].metadata
    if metadata.get("split.count", 1) not in (0, len(files)):
        raise ModelError(f"{paths[0]} is one of {metadata['split.count']} files, {len(files)} are there")
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    arch = metadata.get("general.architecture")
    if arch not in MODEL_TYPES:
        supported = ", ".join(MODEL_TYPES)
        raise ModelError(f"{paths[0]}: general.architecture is {arch!r}, supported are {supported} in GGUF files")
    if TABLE not in tensors:
        raise ModelError(f"{paths[0]} has no tensor {TABLE}")
    keys = _config(arch, metadata, tensors)
    named: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if arch in MIXTURES and (found := EXPERTS.fullmatch(name)):
            named |= _experts(f"model.layers.{found[1]}.mlp.experts", f"{found[2]}_proj.weight", tensor)
        elif name != ROPE_FACTORS:
            named[_name(arch, name)] = _as_transformers(arch, keys, tensor)
    return keys, named, metadata


def _experts(block: str, end: str, stack: GgufTensor) -> dict[str, GgufTensor]:
    """Return the matrices of the experts in a stack [experts, N, K] by their names in transformers."""
    num_experts, num_rows = stack.shape[0], len(stack.raw) // stack.shape[0]
    return {
        f"{block}.{expert}.{end}": replace(
            stack, raw=stack.raw[expert * num_rows : (expert + 1) * num_rows], shape=stack.shape[1:]
        )
        for expert in range(num_experts)
    }


def _config(arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    given = {key: metadata.get(f"{arch}.{name}") for key, name in KEYS.items()}
    keys: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    keys.setdefault("num_key_value_heads", keys["num_attention_heads"])  # only written if config.json had it
    keys |= {
        "model_type": MODEL_TYPES[arch],
        "vocab_size": tensors[TABLE].shape[0],
        "tie_word_embeddings": HEAD not in tensors,
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in tensors,
    }
    for name in ("bos", "eos", "pad"):
        if (token_id := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            keys[f"{name}_token_id"] = token_id
    if rope := _rope(arch, metadata, tensors, keys):
        keys["rope_scaling"] = rope
    if arch.startswith("gemma"):
        width, heads = keys["hidden_size"], keys["num_attention_heads"]
        is_wide = (arch, keys["num_hidden_layers"]) in WIDE_QUERIES
        keys["query_pre_attn_scalar"] = width // heads if is_wide else keys.get("head_dim", width // heads)
        keys["hidden_activation"] = "gelu_pytorch_tanh"
    if arch in MIXTURES:
        keys["norm_topk_prob"] = True
    if arch != "gemma2":
        keys = {key: value for key, value in keys.items() if not key.endswith("_softcapping")}
    if not arch.startswith("gemma"):
        keys.pop("sliding_window", None)
    return keys


def _rope(
    arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], keys: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the scaling of positions. Llama 3's is stored as a factor per frequency, which LongRoPE has as well."""
    if ROPE_FACTORS in tensors:
        factors = tensors[ROPE_FACTORS][:].astype(np.float32).tolist()
        both = {"short_factor": factors, "long_factor": factors}
        original = keys.get("max_position_embeddings")
        return {"rope_type": "longrope", "attention_factor": 1.0, "original_max_position_embeddings": original, **both}
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    factor = metadata.get(f"{arch}.rope.scaling.factor")
    if kind == "none" or not factor:
        return {}
    original = metadata.get(f"{arch}.rope.scaling.original_context_length")
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    return {key: value for key, value in scaling.items() if value is not None}


def _name(arch: str, name: str) -> str:
    """Return the name of a tensor in transformers."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    names = IN_GEMMA_LAYER if arch.startswith("gemma") else IN_MIXTURE_LAYER if arch in MIXTURES else IN_LAYER
    if not found or found[2] not in names:
        raise ModelError(f"the file has tensor {name}, for which a model of the architecture {arch} has no place")
    return f"model.layers.{found[1]}.{names[found[2]]}.{found[3]}"


def _as_transformers(arch: str, keys: Mapping[str, Any], tensor: GgufTensor) -> GgufTensor:
    """Return a tensor as transformers has it."""
    if arch.startswith("gemma") and tensor.name.endswith("norm.weight"):
        return replace(tensor, offset=-1.0)
    heads = keys["num_key_value_heads"] if ".attn_k." in tensor.name else keys["num_attention_heads"]
    if arch == "llama" and re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", tensor.name):
        pairs = np.arange(tensor.shape[0]).reshape(heads, -1, 2)
        return replace(tensor, order=pairs.swapaxes(1, 2).reshape(-1))
    return tensor
