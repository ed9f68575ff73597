"""PaddleOCR-VL: ERNIE 4.5 with 3-D positions and rotary halves, and a SigLIP tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import read_decoder
from engine.models.config_fields import an_object, number, whole_number
from engine.models.ernie4_5 import DEFAULTS, Ernie45
from engine.models.mixture_config import refuse_other_values
from engine.models.siglip import siglip
from engine.models.vision import VisionConfig, VisionFamily, VisionTower
from engine.models.weights import Shard

MROPE = {"rope_type": "default", "mrope_section": [16, 24, 24]}  # the default of transformers


@dataclass(frozen=True, kw_only=True)
class PaddleOcrVl(VisionFamily, Ernie45):
    """Configuration of a PaddleOCR-VL model."""

    mtp_layout = None  # no checkpoint has such a layer

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> PaddleOcrVl:
        keys = {"tie_word_embeddings": True, **DEFAULTS, **an_object(keys, "text_config"), **keys}
        given = an_object(keys, "vision_config")
        refuse_other_values(given, hidden_act="gelu_pytorch_tanh", num_channels=3)
        own = {
            "num_layers": whole_number(given, "num_hidden_layers"),
            "num_heads": whole_number(given, "num_attention_heads"),
            "temporal_patch_size": 1,
            "grid_size": whole_number(given, "image_size", 384) // whole_number(given, "patch_size", 14),
            "epsilon": number(given, "layer_norm_eps", 1e-6),
        }
        vision = VisionConfig.read(keys, own)
        keys["rope_scaling"] = {**MROPE, **an_object(keys, "rope_scaling")}
        return read_decoder(cls, keys, {"use_bias": bool(keys.get("use_bias")), "vision": vision})

    def tower(self, vision: VisionConfig, shard: Shard) -> VisionTower:
        return siglip(vision, shard)
