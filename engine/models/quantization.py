"""Reads a checkpoint's quantization_config: which layers are quantized, and by which reader.

Readers: gptq.py (GPTQ, AWQ), compressed_tensors.py, modelopt.py, and by their tensors fp8.py and fp4.py (8-bit and
4-bit floats) and fastdeploy.py. ModelError reports every other variant, and a checkpoint whose tensors contradict its
config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from engine.dtypes import CODES_PER_SCALE, FP8_BLOCK, SMALL_GROUP
from engine.models.compressed_tensors import compressed_tensors, is_fp4, parts
from engine.models.config_fields import ModelError, an_object
from engine.models.fastdeploy import fastdeploy
from engine.models.gptq import awq, gptq
from engine.models.modelopt import has_fp8, is_modelopt, modelopt
from engine.models.quantized_tensors import KEY, Quantization, need

OF_FASTDEPLOY = {"quantization", "dense_quant_type", "moe_quant_type"}  # keys of a config without quant_method


def read_quantization(keys: Mapping[str, Any]) -> tuple[Quantization, ...]:
    """Return the quantizations of a checkpoint, none if its weights are floats, including 8-bit and 4-bit floats.

    Raises ModelError if the quantization is not supported.
    """
    config = an_object(keys, KEY)
    if not config:
        return ()
    method = _method(config)
    if method not in [*METHODS]:  # config.json may have a value of any type
        raise ModelError(
            f"config.json: {KEY}.quant_method is {method!r}, supported are {', '.join(METHODS)}, and plain weights"
        )
    return tuple(_with_groups(each) for each in METHODS[method](config))


def is_fp8(keys: Mapping[str, Any]) -> bool:
    """Return whether quantization_config declares 8-bit floats.

    Unknown methods return False, since exports of other programs use the same key for something else.
    """
    config = an_object(keys, KEY)
    method = _method(config)
    if method not in [*METHODS] or method in ("fastdeploy", "mxfp4"):
        return False
    if method == "modelopt":
        return has_fp8(config)
    return not is_fp4(config) and not read_quantization(keys)


def _method(config: Mapping[str, Any]) -> Any:
    """Return the quant_method, which FastDeploy and older versions of ModelOpt leave out."""
    if is_modelopt(config):
        return "modelopt"
    return config.get("quant_method", "fastdeploy" if not OF_FASTDEPLOY.isdisjoint(config) else None)


def is_mxfp4(keys: Mapping[str, Any]) -> bool:
    """Return whether quantization_config declares 4-bit floats of experts, as gpt-oss has them."""
    return an_object(keys, KEY).get("quant_method") == "mxfp4"


def unused_settings(keys: Mapping[str, Any]) -> list[str]:
    """Return a message for each setting of quantization_config that the export does not use."""
    config, messages = an_object(keys, KEY), []
    if config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"):
        messages.append(f"config.json: {KEY}: the KV cache has the dtype that USE_CACHE_KV_INT8 and DTYPE select")
    static = [inputs for inputs in parts(config, "input_activations") if inputs.get("dynamic") is False]
    if static or config.get("activation_scheme") == "static":
        messages.append(f"config.json: {KEY}: static scales of activations are not used")
    return messages


def _with_groups(quantization: Quantization) -> Quantization:
    """Return the quantization with the format for its group size."""
    size = quantization.group_size
    if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size not in (-1, 0)):
        raise ModelError(
            f"config.json: {KEY}: the group size is {size!r}, supported are multiples of {SMALL_GROUP}, -1"
        )
    if quantization.format != "weight_only_int4" or size == -1:
        return quantization
    if size < 1 or size % SMALL_GROUP:
        raise ModelError(f"config.json: {KEY}: the group size is {size}, supported are multiples of {SMALL_GROUP}, -1")
    return replace(quantization, format="weight_only_int4_g32") if size % CODES_PER_SCALE else quantization


def _fp8(config: Mapping[str, Any]) -> tuple[Quantization, ...]:
    """Check a config of 8-bit floats. Its settings for activations are ignored, since activations are not quantized."""
    need(config, "fp8", fmt=("e4m3", "float8_e4m3fn", None), weight_block_size=([FP8_BLOCK, FP8_BLOCK], None))
    return ()


METHODS: dict[str, Callable[[Mapping[str, Any]], tuple[Quantization, ...]]] = {
    "compressed-tensors": compressed_tensors,
    "gptq": gptq,
    "awq": lambda config: (awq(config),),
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": modelopt,
    "fastdeploy": fastdeploy,
    "mxfp4": lambda config: (),
}
