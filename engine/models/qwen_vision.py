"""The tower of Qwen2.5-VL: its layers attend to windows, except for some that attend to the whole image."""

from __future__ import annotations

from engine.models.layers import Norm, Place
from engine.models.vision import (
    SEGMENT_ENDS,
    WINDOW_ENDS,
    VisionConfig,
    VisionLayer,
    VisionMlp,
    VisionTower,
    axial_rope,
    dense,
    vision_norm,
)
from engine.models.weights import Shard


def qwen_vision(config: VisionConfig, shard: Shard) -> VisionTower:
    """Return the tower with its projector."""
    (inv_freq, axes), size = axial_rope(config), config.hidden_size
    top, merged = Place(shard, prefix="visual."), size * config.merge_size**2
    return VisionTower(
        patch_embedding=dense(top, "patch_embed", ("patch_embed.proj",), (size, config.patch_values), bias=False),
        layers=tuple(_layer(config, shard, index) for index in range(config.num_layers)),
        norms=(vision_norm(Norm, top, "merger.ln_q", size, config.epsilon),),
        merge=(
            dense(top, "merger.mlp.0", ("merger.mlp.0",), (merged, merged)),
            dense(top, "merger.mlp.2", ("merger.mlp.2",), (config.out_size, merged)),
        ),
        inv_freq=inv_freq,
        axes=axes,
    )


def _layer(config: VisionConfig, shard: Shard, index: int) -> VisionLayer:
    place = Place(shard, prefix=f"visual.blocks.{index}.")
    size, inner = config.hidden_size, config.intermediate_size
    return VisionLayer(
        attention_norm=vision_norm(Norm, place, "norm1", size, config.epsilon),
        qkv=dense(place, "qkv", ("attn.qkv",), (3 * size, size)),
        projection=dense(place, "proj", ("attn.proj",), (size, size)),
        mlp_norm=vision_norm(Norm, place, "norm2", size, config.epsilon),
        mlp=VisionMlp(
            dense(place, "gate_up", ("mlp.gate_proj", "mlp.up_proj"), (inner, size)),
            dense(place, "down", ("mlp.down_proj",), (size, inner)),
            "swiglu",
        ),
        num_heads=config.num_heads,
        ends=SEGMENT_ENDS if index in config.full_layers else WINDOW_ENDS,
        is_bf16=shard.dtype != "float32",
    )
