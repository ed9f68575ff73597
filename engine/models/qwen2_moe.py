"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): Qwen2 with mixtures of experts and a gated shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import layer_windows, read_decoder
from engine.models.config_fields import whole_number
from engine.models.mixture_config import qwen_mixture
from engine.models.qwen2 import Qwen2


@dataclass(frozen=True, kw_only=True)
class Qwen2Moe(Qwen2):
    """Configuration of a Qwen2-MoE model, in which all tokens share a gated expert."""

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Qwen2Moe:
        mixture = qwen_mixture(
            {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, **keys},
            shared="shared_expert",
            shared_size=whole_number(keys, "shared_expert_intermediate_size", 5632),
            shared_gate="shared_expert_gate",
        )
        own = {"qkv_bias": bool(keys.get("qkv_bias", True)), "windows": _windows(keys), "mixture": mixture}
        return read_decoder(cls, keys, own)


def _windows(keys: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the window of each layer in tokens, 0 for full attention. Unlike in Qwen2, every other layer below
    max_window_layers has one, as in transformers."""
    num_layers = 0 if keys.get("max_window_layers") == 0 else whole_number(keys, "max_window_layers", 28)
    has_windows = bool(keys.get("use_sliding_window"))
    return layer_windows(keys, lambda layer: has_windows and layer < num_layers and layer % 2 == 0)
