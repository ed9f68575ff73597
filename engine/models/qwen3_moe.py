"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): Qwen3 with mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import layer_windows, read_decoder
from engine.models.mixture_config import qwen_mixture
from engine.models.qwen3 import Qwen3


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(Qwen3):
    """Configuration of a Qwen3-MoE model."""

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Qwen3Moe:
        mixture = qwen_mixture(
            {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_local_experts": 128, **keys}
        )
        has_windows = bool(keys.get("use_sliding_window"))  # in all layers
        windows = layer_windows(keys, lambda layer: has_windows)
        own = {"attention_bias": bool(keys.get("attention_bias")), "windows": windows, "mixture": mixture}
        return read_decoder(cls, {"num_key_value_heads": 4, **keys}, own)
