"""The towers of Qwen2.5-VL, whose layers attend to windows except for some, and of Qwen3-VL and Qwen3.5, which have
learned positions besides rotary ones. That of Qwen3-VL also projects the outputs of some layers (DeepStack)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.models.config_fields import ModelError, an_object, whole_number
from engine.models.layers import LayerNorm, LayerScope, Linear, Norm
from engine.models.mixture_config import refuse_other_values
from engine.models.vision import (
    SEGMENT_ENDS,
    WINDOW_ENDS,
    DeepStackMerger,
    VisionConfig,
    VisionFamily,
    VisionLayer,
    VisionLayout,
    VisionTower,
    axial_rope,
    dense,
    vision_norm,
)
from engine.models.weights import AxisShard, Shard

QWEN2_5 = VisionLayout(
    norm=Norm,
    norms=("norm1", "norm2"),
    qkv=("attn.qkv",),
    projection="attn.proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    activation="swiglu",
)
QWEN3 = VisionLayout(
    norm=LayerNorm,
    norms=("norm1", "norm2"),
    qkv=("attn.qkv",),
    projection="attn.proj",
    up=("mlp.linear_fc1",),
    down="mlp.linear_fc2",
    activation="gelu",
)


def read_qwen_vision(keys: Mapping[str, Any], own: Mapping[str, Any], **supported: Any) -> VisionConfig:
    """Return the configuration of a tower. `keys` are those of the whole model, `own` other fields, and `supported`
    values of keys that a tower may not have otherwise. Raises ModelError."""
    given, size = an_object(keys, "vision_config"), whole_number(keys, "hidden_size")
    refuse_other_values(given, in_channels=3, in_chans=3, out_hidden_size=size, **supported)
    shared = {
        "num_layers": whole_number(given, "depth"),
        "num_heads": whole_number(given, "num_heads"),
        "temporal_patch_size": whole_number(given, "temporal_patch_size", 2),
        "epsilon": 1e-6,
    }
    return VisionConfig.read(keys, shared | dict(own))


class Qwen3VisionFamily(VisionFamily):
    """Configuration of a family whose models may have the tower of Qwen3-VL or of Qwen3.5."""

    def tower(self, vision: VisionConfig, shard: Shard) -> VisionTower:
        return qwen3_vision(vision, shard)


def read_qwen3_vision(keys: Mapping[str, Any], sections: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys with `sections` of 3-D positions, unless config.json has its own, and the fields of a
    Qwen3VisionFamily. Raises ModelError."""
    given = an_object(keys, "vision_config")
    if not given:
        return dict(keys), {"takes_spans": False}
    num_positions, num_layers = whole_number(given, "num_position_embeddings", 2304), whole_number(given, "depth")
    grid_size, layers = round(num_positions**0.5), given.get("deepstack_visual_indexes") or []
    if grid_size**2 != num_positions:
        raise ModelError(f"config.json: num_position_embeddings is {num_positions}, it must be a square number")
    if not isinstance(layers, list) or [layer for layer in range(num_layers) if layer in layers] != layers:
        raise ModelError(f"config.json: deepstack_visual_indexes is {layers!r}, supported are ascending layers")
    if len(layers) >= (num_decoder_layers := whole_number(keys, "num_hidden_layers")):
        limit = f"it must be more than the {len(layers)} of deepstack_visual_indexes"
        raise ModelError(f"config.json: num_hidden_layers is {num_decoder_layers}, {limit}")
    rope = {"mrope_section": list(sections), "mrope_interleaved": True, **an_object(keys, "rope_scaling")}
    keys = {**keys, "rope_scaling": rope, "vision_config": {"patch_size": 16, **given}}
    own = {"grid_size": grid_size, "aligns_corners": True, "deepstack": tuple(layers)}
    vision = read_qwen_vision(keys, own, hidden_act="gelu_pytorch_tanh")
    return keys, {"vision": vision, "num_deepstack_layers": len(layers)}


def qwen2_5_vision(config: VisionConfig, shard: Shard) -> VisionTower:
    """Return the tower of Qwen2.5-VL with its projector."""
    (inv_freq, axes), size, top = axial_rope(config), config.hidden_size, LayerScope(shard, prefix="visual.")
    of_windows = WINDOW_ENDS if config.has_full_layers else SEGMENT_ENDS
    ends = [SEGMENT_ENDS if index in config.full_layers else of_windows for index in range(config.num_layers)]
    return VisionTower(
        patch_embedding=dense(top, "patch_embed", ("patch_embed.proj",), (size, config.patch_values), bias=False),
        layers=tuple(VisionLayer.of(config, _block(shard, index), QWEN2_5, each) for index, each in enumerate(ends)),
        norms=(vision_norm(Norm, top, "merger.ln_q", size, config.epsilon),),
        merge=_merge(config, top, ("merger.mlp.0", "merger.mlp.2")),
        inv_freq=inv_freq,
        axes=axes,
    )


def qwen3_vision(config: VisionConfig, shard: Shard) -> VisionTower:
    """Return the tower of Qwen3-VL or Qwen3.5 with its projectors."""
    (inv_freq, axes), size, top = axial_rope(config), config.hidden_size, LayerScope(shard, prefix="visual.")
    grid, merged = (AxisShard.whole(config.grid_size**2), AxisShard.whole(size)), size * config.merge_size**2
    projectors = [LayerScope(shard, prefix=f"visual.deepstack_merger_list.{i}.") for i in range(len(config.deepstack))]
    names = ("linear_fc1", "linear_fc2")
    return VisionTower(
        patch_embedding=dense(top, "patch_embed", ("patch_embed.proj",), (size, config.patch_values)),
        layers=tuple(VisionLayer.of(config, _block(shard, index), QWEN3) for index in range(config.num_layers)),
        norms=(vision_norm(LayerNorm, top, "merger.norm", size, config.epsilon),),
        merge=_merge(config, LayerScope(shard, prefix="visual.merger."), names),
        inv_freq=inv_freq,
        axes=axes,
        grid=top.weight("grid", [("pos_embed.weight", grid)]),
        deepstack=tuple(
            DeepStackMerger(
                layer, vision_norm(LayerNorm, scope, "norm", merged, config.epsilon), _merge(config, scope, names)
            )
            for layer, scope in zip(config.deepstack, projectors, strict=True)
        ),
    )


def _block(shard: Shard, index: int) -> LayerScope:
    return LayerScope(shard, prefix=f"visual.blocks.{index}.")


def _merge(config: VisionConfig, scope: LayerScope, names: tuple[str, str]) -> tuple[Linear, Linear]:
    """Return the two linear layers of a projector."""
    merged = config.hidden_size * config.merge_size**2
    before, behind = names
    return (
        dense(scope, before, (before,), (merged, merged)),
        dense(scope, behind, (behind,), (config.out_size, merged)),
    )
