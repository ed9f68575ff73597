"""Small configurations of families that read images, and the names and shapes of their tensors in checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from engine.models.vision_checkpoint import PATCH_EMBEDDINGS
from tests.images import SMALL, TOKENS

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 150,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
}
MROPE = {"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True}
QWEN3_TOWER = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_heads": 3,
    "num_position_embeddings": 25,
    "out_hidden_size": 64,
    "patch_size": 16,
    "temporal_patch_size": 2,
}
VISION_FAMILIES: dict[str, dict[str, Any]] = {
    "paddleocr_vl": {  # as released: all keys of the decoder at the top
        **TOKENS,
        "architectures": ["PaddleOCRVLForConditionalGeneration"],
        "head_dim": 16,
        "pad_token_id": 0,
        "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]},
        "vision_config": {
            "hidden_size": 48,
            "image_size": 70,
            "intermediate_size": 70,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "patch_size": 14,
        },
    },
    "qwen2_5_vl": {  # as transformers 5 writes it
        **TOKENS,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": {
            **TEXT,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "depth": 4,
            "fullatt_block_indexes": [1, 3],
            "hidden_size": 48,
            "intermediate_size": 70,
            "num_heads": 3,
            "out_hidden_size": 64,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "window_size": 56,
        },
    },
    "qwen3_vl": {  # as released
        **TOKENS,
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {**TEXT, "head_dim": 16, "rope_theta": 1e4, "rope_scaling": MROPE},
        "vision_config": {**QWEN3_TOWER, "deepstack_visual_indexes": [0, 2, 3]},
    },
    "qwen3_vl_moe": {
        **TOKENS,
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "mlp_only_layers": [1],
            "moe_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "rope_theta": 1e4,
            "rope_scaling": MROPE,
        },
        "vision_config": {**QWEN3_TOWER, "depth": 2, "deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {
        **TOKENS,
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {
            **TEXT,
            "model_type": "qwen3_5_text",
            "attn_output_gate": True,
            "full_attention_interval": 2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {**QWEN3_TOWER, "deepstack_visual_indexes": []},
    },
}


def as_stored(config: dict[str, Any], name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """Return the name and the values that a checkpoint of the family has for a tensor of the networks."""
    if name.endswith(PATCH_EMBEDDINGS):
        size, frames = config["vision_config"]["patch_size"], config["vision_config"].get("temporal_patch_size")
        values = values.reshape(len(values), 3, *[frames] * bool(frames), size, size)
    if "text_config" in config and name.startswith("visual."):
        name = f"model.{name}"
    return (name.replace("projector.", "mlp_AR.", 1) if name.startswith("projector.") else name), values


def write_processor(directory: Path, model_type: str) -> None:
    """Write preprocessor_config.json for a family that reads images."""
    if model_type in VISION_FAMILIES:
        (directory / "preprocessor_config.json").write_text(json.dumps(SMALL) + "\n")
