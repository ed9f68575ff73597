"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import layer_windows, read_decoder
from engine.models.config_fields import whole_number
from engine.models.mistral import Mistral
from engine.models.mixture_config import MixtureConfig, Routing, mixture_layers, num_experts


@dataclass(frozen=True, kw_only=True)
class Mixtral(Mistral):
    """Configuration of a Mixtral model."""

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Mixtral:
        given = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, **keys}
        mixture = MixtureConfig(
            num_experts=num_experts(keys, 8),
            intermediate_size=whole_number(keys, "intermediate_size"),
            layers=mixture_layers(keys),
            routing=Routing(top_k=whole_number(keys, "num_experts_per_tok", 2), renormalize=1),
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        )
        return read_decoder(cls, given, {"windows": layer_windows(given, lambda layer: True), "mixture": mixture})
