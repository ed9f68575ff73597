"""Recognizes the kind of a PaddleNLP export. The errors for unsupported kinds name the step to take instead."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from engine.models.config_fields import ModelError
from engine.models.families import FAMILIES
from engine.models.formats import QUANTIZED, without_cache

MIXTURES = ("mixtral", "qwen2_moe")
MODEL_TYPES = ("llama", "qwen2", *MIXTURES)
QUANT_TYPES = (None, "", "none", "weight_only_int8", "weight_only_int4")
OF_LAYER = re.compile(r"fuse([a-z0-9_]+)\.\d+\.(\w+)")
# Names of parameters that identify a kind of quantization
A8W8, FP8 = "qkv_out_scale", "ffn1_0_weight"
INT8_CACHE = "cache_k_scale"
FROM_CHECKPOINT = "start the server with the checkpoint that it was exported from"


def kind_of(parameters: Iterable[str]) -> tuple[str | None, str | None]:
    """Return the model_type and the quant_type that an export's parameter names imply; None for what they do not."""
    found = [match for name in parameters if (match := OF_LAYER.fullmatch(name))]
    leaves = {match[2] for match in found}
    cache = "c8" if INT8_CACHE in leaves else ""
    quant_type = f"a8w8{cache}_fp8" if FP8 in leaves else f"a8w8{cache}" if A8W8 in leaves else None
    return found[0][1] if found else None, quant_type


def refuse(export: Any, model_type: Any, quant_type: Any) -> None:
    """Raise ModelError unless exports of this kind are supported. `export` names the export in the message."""
    if str(model_type).endswith("_mtp"):
        raise ModelError(f"{export} is a PaddleNLP export of a draft model: serve the model that it drafts for")
    if model_type not in [*FAMILIES]:  # config.json may have a value of any type
        known = ", ".join(FAMILIES)
        raise ModelError(
            f"{export} is a PaddleNLP export of {model_type!r}, a family that is not supported: serve a model of one"
            f" that is, {known}"
        )
    if model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ModelError(
            f"{export} is a PaddleNLP export of {model_type!r}, only those of {known} are read: {FROM_CHECKPOINT}"
        )
    if quant_type not in QUANT_TYPES:
        raise ModelError(
            f"{export} is a PaddleNLP export with quant_type {quant_type!r}, read are none,"
            f" {', '.join(filter(None, QUANT_TYPES[3:]))}: {FROM_CHECKPOINT}{_with_settings(str(quant_type))}"
        )


def _with_settings(quant_type: str) -> str:
    """Return a text that names our settings nearest to a quant_type of PaddleNLP; empty if there are none."""
    name, has_int8_cache = without_cache(quant_type)
    if name not in QUANTIZED:
        return ""
    return f" and QUANT_TYPE={name}" + (", USE_CACHE_KV_INT8=1" if has_int8_cache else "")
