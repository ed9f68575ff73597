"""Qwen3-VL, dense and with mixtures of experts: Qwen3 with 3-D positions, and a tower whose layers also add features
behind the first layers of the decoder (DeepStack)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import read_decoder
from engine.models.config_fields import an_object
from engine.models.mixture_config import MixtureConfig, qwen_mixture
from engine.models.qwen3 import Qwen3
from engine.models.qwen_vision import Qwen3VisionFamily, read_qwen3_vision

MROPE_SECTION = (24, 20, 20)  # the default of transformers


@dataclass(frozen=True, kw_only=True)
class Qwen3Vl(Qwen3VisionFamily, Qwen3):
    """Configuration of a dense Qwen3-VL model."""

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Qwen3Vl:
        keys = {"rope_theta": 500000.0, **an_object(keys, "text_config"), **keys}
        keys, of_tower = read_qwen3_vision(keys, MROPE_SECTION)
        own = {"attention_bias": bool(keys.get("attention_bias")), "mixture": cls.mixture_of(keys), **of_tower}
        return read_decoder(cls, keys, own, head_dim=128)


class Qwen3VlMoe(Qwen3Vl):
    """Configuration of a Qwen3-VL model with mixtures of experts."""

    @classmethod
    def mixture_of(cls, keys: Mapping[str, Any]) -> MixtureConfig:
        return qwen_mixture({**keys, "norm_topk_prob": True})
