"""Qwen3-Next: the network of Qwen3.5 with mixtures of experts. Its checkpoints group projections by key heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.models.qwen3_5_moe import Qwen35Moe


class Qwen3Next(Qwen35Moe):
    """Configuration of a Qwen3-Next model."""

    defaults: ClassVar[Mapping[str, Any]] = {**Qwen35Moe.defaults, "num_experts": 512, "num_experts_per_tok": 10}
    is_grouped = True
