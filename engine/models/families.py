"""The families of models by their model_type: one file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.config import DecoderConfig
from engine.models.ernie4_5 import Ernie45
from engine.models.keys import ModelError
from engine.models.llama import Llama
from engine.models.mistral import Mistral
from engine.models.qwen2 import Qwen2
from engine.models.qwen3 import Qwen3

FAMILIES: dict[str, type[DecoderConfig]] = {
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "ernie4_5": Ernie45,
}


def read_model(keys: Mapping[str, Any]) -> DecoderConfig:
    """`keys` is the parsed config.json. Raises ModelError for what is not supported."""
    model_type = keys.get("model_type")
    if model_type not in FAMILIES:
        raise ModelError(f"config.json: model_type is {model_type!r}, supported are {', '.join(FAMILIES)}")
    return FAMILIES[model_type].read(keys)
