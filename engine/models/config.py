"""Reads a Hugging Face config.json into the few numbers a decoder is made of, and refuses what it cannot express.

Knows the families' configuration keys, old and new. Knows neither tensors nor Paddle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.keys import ModelError, an_object, number, whole_number
from engine.models.rope import Rope, read_rope


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder with rotary positions, grouped-query attention and a gated MLP, in the words of config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens the model was made for, after rope scaling
    rms_norm_eps: float
    rope: Rope
    tied_embeddings: bool  # the output projection is the embedding table
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # rms_norm over each query and key head
    sliding_window: int | None = None  # some layer looks back only so far: exact up to this length


# What sets the families apart, read from their own keys.
FAMILIES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "llama": lambda keys: {
        "qkv_bias": keys.get("attention_bias", False),
        "o_bias": keys.get("attention_bias", False),
        "mlp_bias": keys.get("mlp_bias", False),
    },
    "mistral": lambda keys: {},
    "qwen2": lambda keys: {"qkv_bias": True},
    "qwen3": lambda keys: {
        "qkv_bias": keys.get("attention_bias", False),
        "o_bias": keys.get("attention_bias", False),
        "qk_norm": True,
    },
}


def read_config(keys: Mapping[str, Any]) -> DecoderConfig:
    """`keys` is the parsed config.json. Raises ModelError for anything this decoder would compute differently."""
    model_type = keys.get("model_type")
    if model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ModelError(f"config.json: model_type is {model_type!r}, supported are {supported}")
    _refuse_what_is_not_built(keys)
    hidden_size = whole_number(keys, "hidden_size")
    num_heads = whole_number(keys, "num_attention_heads")
    head_dim = whole_number(keys, "head_dim", 128 if model_type == "qwen3" else hidden_size // num_heads)
    max_positions = whole_number(keys, "max_position_embeddings")
    rope = read_rope(keys, head_dim, max_positions)
    if dual_chunk := an_object(keys, "dual_chunk_attention_config"):  # not built, and not needed up to that length
        max_positions = min(max_positions, whole_number(dual_chunk, "original_max_position_embeddings"))
    config = DecoderConfig(
        model_type=model_type,
        vocab_size=whole_number(keys, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=whole_number(keys, "intermediate_size"),
        num_layers=whole_number(keys, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=whole_number(keys, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=max(max_positions, rope.max_positions),
        rms_norm_eps=number(keys, "rms_norm_eps", 1e-6),
        rope=rope,
        tied_embeddings=bool(keys.get("tie_word_embeddings", False)),
        sliding_window=_sliding_window(keys),
        **FAMILIES[model_type](keys),
    )
    _check_heads(config)
    return config


def _refuse_what_is_not_built(keys: Mapping[str, Any]) -> None:
    if keys.get("quantization_config") is not None:
        method = an_object(keys, "quantization_config").get("quant_method", "unknown")
        raise ModelError(
            f"config.json: quantization_config is present (quant_method {method!r}),"
            " supported are checkpoints with float32, bfloat16 or float16 weights"
        )
    activation = keys.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act is {activation!r}, supported is 'silu'")
    if keys.get("is_causal", True) is not True:
        raise ModelError(f"config.json: is_causal is {keys['is_causal']!r}, supported is True: models that write text")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if keys.get(name):
            raise ModelError(f"config.json: {name} is {keys[name]!r}, mixtures of experts are not supported yet")


def _check_heads(config: DecoderConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads is {config.num_heads}, it must be a multiple of"
            f" num_key_value_heads, which is {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ModelError(f"config.json: head_dim is {config.head_dim}, rotary positions need an even one")


def _sliding_window(keys: Mapping[str, Any]) -> int | None:
    """The window of the layers that have one, None when no layer has."""
    if not _has_sliding_layers(keys) or keys.get("sliding_window", 4096) is None:
        return None
    return whole_number(keys, "sliding_window", 4096)


def _has_sliding_layers(keys: Mapping[str, Any]) -> bool:
    layer_types = keys.get("layer_types")
    if layer_types is not None:
        for kind in layer_types:
            if kind not in ("full_attention", "sliding_attention"):
                raise ModelError(f"config.json: layer_types has {kind!r}, supported is 'full_attention'")
        return "sliding_attention" in layer_types
    if keys["model_type"] == "mistral":  # all layers, and use_sliding_window is not one of its keys
        return True
    if not keys.get("use_sliding_window"):
        return False
    # So many of the first ones see everything; 0 is allowed, which whole_number refuses.
    num_full_layers = 0 if keys.get("max_window_layers") == 0 else whole_number(keys, "max_window_layers", 28)
    return num_full_layers < keys["num_hidden_layers"]
