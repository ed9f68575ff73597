"""Qwen2.5-VL: Qwen2.5 with 3-D positions, and a tower with windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import read_decoder
from engine.models.config_fields import an_object, layer_list, whole_number
from engine.models.qwen2 import Qwen2, upper_windows
from engine.models.qwen_vision import qwen2_5_vision, read_qwen_vision
from engine.models.vision import VisionConfig, VisionFamily, VisionTower
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Qwen25Vl(VisionFamily, Qwen2):
    """Configuration of a Qwen2.5-VL model."""

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Qwen25Vl:
        defaults = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
        keys = {**defaults, **an_object(keys, "text_config"), **keys}
        given = an_object(keys, "vision_config")
        unit = whole_number(given, "patch_size", 14) * whole_number(given, "spatial_merge_size", 2)
        full_layers = layer_list(given, "fullatt_block_indexes", (7, 15, 23, 31))
        has_windows = not set(range(whole_number(given, "depth"))) <= set(full_layers)
        own = {
            "window": whole_number(given, "window_size", 112) // unit if has_windows else 0,
            "full_layers": full_layers,
        }
        vision = read_qwen_vision(keys, own, hidden_act="silu")
        return read_decoder(cls, keys, {"windows": upper_windows(keys), "vision": vision})

    def tower(self, vision: VisionConfig, shard: Shard) -> VisionTower:
        return qwen2_5_vision(vision, shard)
