"""Qwen3.5 with mixtures of experts, which have a gated shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.models.config_fields import whole_number
from engine.models.mixture_config import MixtureConfig, qwen_mixture
from engine.models.qwen3_5 import Qwen35


class Qwen35Moe(Qwen35):
    """Configuration of a Qwen3.5 model with mixtures of experts."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen35.defaults,
        "intermediate_size": 5632,  # of layers without experts
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 2,
    }

    @classmethod
    def mixture_of(cls, keys: Mapping[str, Any]) -> MixtureConfig:
        shared_size = whole_number(keys, "shared_expert_intermediate_size", 512)
        return qwen_mixture(keys, shared="shared_expert", shared_size=shared_size, shared_gate="shared_expert_gate")
