"""Granite 3 with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config_fields import whole_number
from engine.models.granite import Granite
from engine.models.mixture_config import MixtureConfig, Routing, mixture_layers, num_experts
from engine.ops.catalogue_experts import SOFTMAX_OF_CHOSEN


@dataclass(frozen=True, kw_only=True)
class GraniteMoe(Granite):
    """Configuration of a Granite 3 model with a mixture of experts in every layer."""

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> GraniteMoe:
        mixture = MixtureConfig(
            num_experts=num_experts(keys, 8),
            intermediate_size=whole_number(keys, "intermediate_size"),
            layers=mixture_layers(keys),
            routing=Routing(top_k=whole_number(keys, "num_experts_per_tok", 2), scoring=SOFTMAX_OF_CHOSEN),
            block="block_sparse_moe",
            router="router.layer",
        )
        config = cls.with_mixture(keys, mixture)
        assert isinstance(config, GraniteMoe)
        return config
