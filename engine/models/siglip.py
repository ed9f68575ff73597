"""The tower of PaddleOCR-VL: SigLIP at the resolution of the image, with learned and rotary positions."""

from __future__ import annotations

from engine.models.layers import LayerNorm, Place
from engine.models.vision import (
    SEGMENT_ENDS,
    VisionConfig,
    VisionLayer,
    VisionMlp,
    VisionTower,
    axial_rope,
    dense,
    vision_norm,
)
from engine.models.weights import Shard, Share

PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
PROJECTOR_EPSILON = 1e-5


def siglip(config: VisionConfig, shard: Shard) -> VisionTower:
    """Return the tower with its projector."""
    top, projector = Place(shard, prefix="visual.vision_model."), Place(shard, prefix="projector.")
    (inv_freq, axes), size = axial_rope(config), config.hidden_size
    merged, grid = size * config.merge_size**2, (Share.whole(config.grid_size**2), Share.whole(size))
    patches = "embeddings.patch_embedding"
    return VisionTower(
        patch_embedding=dense(top, patches, (patches,), (size, config.patch_values)),
        layers=tuple(_layer(config, shard, index) for index in range(config.num_layers)),
        norms=(
            vision_norm(LayerNorm, top, "post_layernorm", size, config.epsilon),
            vision_norm(LayerNorm, projector, "pre_norm", size, PROJECTOR_EPSILON),
        ),
        merge=(
            dense(projector, "linear_1", ("linear_1",), (merged, merged)),
            dense(projector, "linear_2", ("linear_2",), (config.out_size, merged)),
        ),
        inv_freq=inv_freq,
        axes=axes,
        grid=top.weight("embeddings.grid", [("embeddings.position_embedding.weight", grid)]),
    )


def _layer(config: VisionConfig, shard: Shard, index: int) -> VisionLayer:
    place, size, inner = (
        Place(shard, prefix=f"visual.vision_model.encoder.layers.{index}."),
        config.hidden_size,
        config.intermediate_size,
    )
    return VisionLayer(
        attention_norm=vision_norm(LayerNorm, place, "layer_norm1", size, config.epsilon),
        qkv=dense(place, "qkv", PARTS, (size, size)),
        projection=dense(place, "out_proj", ("self_attn.out_proj",), (size, size)),
        mlp_norm=vision_norm(LayerNorm, place, "layer_norm2", size, config.epsilon),
        mlp=VisionMlp(
            dense(place, "fc1", ("mlp.fc1",), (inner, size)),
            dense(place, "fc2", ("mlp.fc2",), (size, inner)),
            "gelu",
        ),
        num_heads=config.num_heads,
        ends=SEGMENT_ENDS,
        is_bf16=shard.dtype != "float32",
    )
