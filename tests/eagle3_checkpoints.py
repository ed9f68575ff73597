"""Small random EAGLE-3 heads in both layouts, for the checkpoints of tests/checkpoints.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.checkpoints import make_checkpoint, write_tensors

NUM_LAYERS = 6
LAYER_IDS = {"llama": (2, 3, 3), "qwen3": (0, 2, 5)}  # by the family of the model; Llama's head names none
DRAFT_VOCAB = 200
LIKE_LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}


def make_model(directory: Path, family: str) -> Path:
    """Write a checkpoint of a model."""
    return make_checkpoint(directory, family, num_hidden_layers=NUM_LAYERS)


def make_head(directory: Path, family: str, model: Path, **overrides: Any) -> Path:
    """Write a head for a model: for Llama in the layout of SpecForge, else in that of `speculators`. `overrides` are
    keys of config.json."""
    target = json.loads((model / "config.json").read_text())
    own = LIKE_LLAMA | {name: target[name] for name in ("hidden_size", "vocab_size")}
    ids = list(LAYER_IDS[family])
    if family == "llama":
        keys = own | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
    else:
        keys = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": own,
            "draft_vocab_size": DRAFT_VOCAB,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": ids,
        }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(keys | overrides, indent=2) + "\n")
    write_tensors(directory / "model.safetensors", head_tensors(own, "midlayer" if family == "llama" else "layers.0"))
    return directory


def head_tensors(keys: dict[str, Any], block: str) -> dict[str, np.ndarray]:
    """Return the tensors of a head. One whose layer is not called `midlayer` has an embedding of its own."""
    rng, size, inner, head = np.random.default_rng(5), keys["hidden_size"], keys["intermediate_size"], keys["head_dim"]
    num_heads, num_kv_heads, vocab = (
        keys[name] for name in ("num_attention_heads", "num_key_value_heads", "vocab_size")
    )
    shapes = {
        "fc": (size, 3 * size),
        "lm_head": (DRAFT_VOCAB, size),
        f"{block}.self_attn.q_proj": (num_heads * head, 2 * size),
        f"{block}.self_attn.k_proj": (num_kv_heads * head, 2 * size),
        f"{block}.self_attn.v_proj": (num_kv_heads * head, 2 * size),
        f"{block}.self_attn.o_proj": (size, num_heads * head),
        f"{block}.mlp.gate_proj": (inner, size),
        f"{block}.mlp.up_proj": (inner, size),
        f"{block}.mlp.down_proj": (size, inner),
        **({} if block == "midlayer" else {"embed_tokens": (vocab, size)}),
    }
    made = {
        f"{name}.weight": (2 * rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    norms = [f"{block}.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")]
    for name in ("norm", *norms):
        made[f"{name}.weight"] = (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)
    ids = np.sort(rng.choice(vocab, DRAFT_VOCAB, replace=False))
    return made | {"d2t": ids - np.arange(DRAFT_VOCAB), "t2d": np.isin(np.arange(vocab), ids)}


def make_right(model: Path, head: Path) -> None:
    """Change the weights so that the next token depends on the last one alone, and the head drafts what follows."""
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:] = 0.0
    write_tensors(model / "model.safetensors", tensors)
    keys = json.loads((head / "config.json").read_text())
    layer, size = keys["transformer_layer_config"], keys["transformer_layer_config"]["hidden_size"]
    layer |= {"attention_bias": True, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": size // 4}
    keys["draft_vocab_size"] = layer["vocab_size"]
    (head / "config.json").write_text(json.dumps(keys))
    own, block = load_file(head / "model.safetensors"), "layers.0"
    own |= {"embed_tokens.weight": tensors["model.embed_tokens.weight"], "norm.weight": tensors["model.norm.weight"]}
    own["lm_head.weight"] = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    own["d2t"], own["t2d"] = np.zeros(layer["vocab_size"], np.int64), np.ones(layer["vocab_size"], bool)
    for name in "qkvo":  # each position attends to itself alone, and takes the embedding of its token
        own[f"{block}.self_attn.{name}_proj.weight"] = np.zeros((size, size if name == "o" else 2 * size), np.float32)
        own[f"{block}.self_attn.{name}_proj.bias"] = np.full(size, 30.0 * (name in "qk"), np.float32)
    for name in "vo":
        np.fill_diagonal(own[f"{block}.self_attn.{name}_proj.weight"], 1.0)
    for name in ("hidden_norm", "mlp.down_proj"):
        own[f"{block}.{name}.weight"][:] = 0.0
    own[f"{block}.input_layernorm.weight"][:] = 1.0
    write_tensors(head / "model.safetensors", own)
