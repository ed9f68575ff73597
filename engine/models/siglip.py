"""The tower of PaddleOCR-VL: SigLIP at the resolution of the image, with learned and rotary positions."""

from __future__ import annotations

from engine.models.layers import LayerNorm, LayerScope
from engine.models.vision import (
    VisionConfig,
    VisionLayer,
    VisionLayout,
    VisionTower,
    axial_rope,
    dense,
    vision_norm,
)
from engine.models.weights import AxisShard, Shard

LAYOUT = VisionLayout(
    norm=LayerNorm,
    norms=("layer_norm1", "layer_norm2"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    projection="self_attn.out_proj",
    up=("mlp.fc1",),
    down="mlp.fc2",
    activation="gelu",
)
PROJECTOR_EPSILON = 1e-5


def siglip(config: VisionConfig, shard: Shard) -> VisionTower:
    """Return the tower with its projector."""
    top, projector = LayerScope(shard, prefix="visual.vision_model."), LayerScope(shard, prefix="projector.")
    places = [LayerScope(shard, prefix=f"visual.vision_model.encoder.layers.{i}.") for i in range(config.num_layers)]
    (inv_freq, axes), size = axial_rope(config), config.hidden_size
    merged, grid = size * config.merge_size**2, (AxisShard.whole(config.grid_size**2), AxisShard.whole(size))
    patches = "embeddings.patch_embedding"
    return VisionTower(
        patch_embedding=dense(top, patches, (patches,), (size, config.patch_values)),
        layers=tuple(VisionLayer.of(config, scope, LAYOUT) for scope in places),
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
