"""dots.llm1: like GLM-4.5 with a norm of each query and key head; upper layers may have a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import layer_windows, read_decoder
from engine.models.config_fields import whole_number
from engine.models.glm4_moe import Glm4Moe
from engine.models.mixture_config import deepseek_mixture


@dataclass(frozen=True, kw_only=True)
class Dots1(Glm4Moe):
    """Configuration of a dots.llm1 model."""

    mtp_layout = None
    rotates_partly = False

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Dots1:
        num_layers, window = whole_number(keys, "num_hidden_layers"), keys.get("sliding_window", 4096)
        num_full = num_layers if window is None else whole_number(keys, "max_window_layers", 62, 0)
        bias = bool(keys.get("attention_bias"))
        # The released config.json has the name of the method here; transformers computes sigmoid scores.
        scores = {**keys, "scoring_func": None} if keys.get("scoring_func") == "noaux_tc" else keys
        own = {
            "attention_bias": bias,
            "output_bias": bias,
            "has_head_norms": True,
            "windows": layer_windows(keys, lambda layer: layer >= num_full),
            "mixture": deepseek_mixture(scores),
        }
        return read_decoder(cls, keys, own)
