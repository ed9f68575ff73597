"""Reads how ModelOpt has quantized a checkpoint: from the quantization_config of config.json, or from the file
hf_quant_config.json beside it, which is all that older versions write.

The matrices themselves are recognised by the dtypes of their tensors (fp8.py, fp4.py). This module checks that they are
what ModelOpt says. Independent of models and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.dtypes import FP8_BLOCK
from engine.models.compressed_tensors import as_stored
from engine.models.config_fields import ModelError, an_object, read_json
from engine.models.fp4 import Fp4
from engine.models.fp8 import ScaledFp8Tensor
from engine.models.quantized_tensors import KEY, WIDER, Quantization
from engine.models.stored_tensors import StoredTensor

CONFIG, FILE, METHOD = "config.json", "hf_quant_config.json", "modelopt"
MIXED, INT8 = "MIXED_PRECISION", "W8A16"
FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")  # one scale per matrix, per row, per 128 x 128
NVFP4 = ("NVFP4", "W4A16_NVFP4")
ALGORITHMS = (*FP8, *NVFP4, INT8)
ALL_LAYERS = ""


def read_config(directory: Path) -> dict[str, Any]:
    """Return the keys of config.json in a folder, with those of hf_quant_config.json in quantization_config.

    Raises ModelError if the two files contradict each other.
    """
    keys = read_json(directory / CONFIG)
    if KEY not in keys and "compression_config" in keys:  # the name that compressed-tensors first gave the key
        keys[KEY] = keys.pop("compression_config")
    if not (directory / FILE).exists():
        return keys
    found, known = _one_level(read_json(directory / FILE)), _one_level(an_object(keys, KEY))
    if known and not is_modelopt(known):
        raise ModelError(
            f"{CONFIG}: {KEY}.quant_method is {known.get('quant_method')!r}, but there is a {FILE}, which only ModelOpt"
            " writes; remove the one that is wrong"
        )
    named = [each["quant_algo"] for each in (found, known) if each.get("quant_algo")]
    if len({str(name).upper() for name in named}) > 1:
        raise ModelError(
            f"{FILE}: quant_algo is {named[0]!r}, but {CONFIG}: {KEY}.quant_algo is {named[1]!r}; remove the file that"
            " is wrong"
        )
    return keys | {KEY: {"quant_method": METHOD} | found | known}


def is_modelopt(config: Mapping[str, Any]) -> bool:
    """Return whether a quantization_config is one of ModelOpt, whose older versions leave the method out."""
    method = config.get("quant_method")
    if method is None:
        return "quant_algo" in config or isinstance(config.get("quantization"), Mapping)
    return isinstance(method, str) and method.startswith(METHOD)


def modelopt(config: Mapping[str, Any]) -> tuple[Quantization, ...]:
    """Return the quantization of the layers of 8-bit integers, if there are some; those of floats have none. Raises
    ModelError for algorithms that are not supported."""
    if INT8 not in algorithms(config).values():
        return ()
    return (Quantization(METHOD, WIDER, False, -1, ("weight", "weight_scale"), as_stored),)


def has_fp8(config: Mapping[str, Any]) -> bool:
    """Return whether layers are stored as 8-bit floats. Raises ModelError for algorithms that are not supported."""
    return any(algorithm in FP8 for algorithm in algorithms(config).values())


def algorithms(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the algorithm of each layer by its name, or that of all layers under the name `ALL_LAYERS`.

    The result is empty if only the KV cache is quantized. Raises ModelError for algorithms that are not supported.
    """
    config = _one_level(config)
    named = config.get("quant_algo")
    if named is None and (config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")):
        return {}
    if str(named).upper() != MIXED:
        return {ALL_LAYERS: _supported(named, "quant_algo")}
    layers = an_object(config, "quantized_layers")
    if not layers:
        raise ModelError(f"{KEY} of ModelOpt: quant_algo is {named!r}, but quantized_layers is missing or empty")
    return {layer: _supported(an_object(layers, layer).get("quant_algo"), f"quant_algo of {layer}") for layer in layers}


def check_stored(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ModelError if a layer, or every layer, is stored otherwise than ModelOpt says."""
    if not is_modelopt(config):
        return
    for layer, algorithm in algorithms(config).items():
        named = [f"{layer}.weight"] if layer else [name for name in tensors if name.endswith(".weight")]
        kinds = {name: _kinds(tensors[name]) for name in named if name in tensors}
        if kinds and not any(algorithm in each for each in kinds.values()):
            name = next((name for name, each in kinds.items() if each), next(iter(kinds)))
            dtype = f"as {' or '.join(kinds[name])}" if kinds[name] else f"with dtype {tensors[name].get_dtype()}"
            raise ModelError(
                f"{KEY} of ModelOpt: quant_algo{' of ' * bool(layer)}{layer} is {algorithm}, but tensor {name} is"
                f" stored {dtype}"
            )


def _kinds(tensor: StoredTensor) -> tuple[str, ...]:
    """Return the algorithms that a tensor may come from. A small matrix has as many scales per block as per matrix."""
    if isinstance(tensor, Fp4):
        rows, columns = tensor.get_shape()
        return NVFP4 if tensor.scale.shape == (rows, columns // 16) else ()
    if isinstance(tensor, ScaledFp8Tensor):
        rows, columns = tensor.get_shape()
        shapes = ((1, 1), (rows, 1), (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)))
        return tuple(name for name, shape in zip(FP8, shapes, strict=True) if tensor.scale.shape == shape)
    return (INT8,) if tensor.get_dtype() == "I8" else ()


def _one_level(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ModelOpt's config with those of its object `quantization`, as in the file, on one level."""
    nested = config.get("quantization")
    if nested is None or isinstance(nested, str):  # FastDeploy's config has a text there
        return dict(config)
    return {name: value for name, value in config.items() if name != "quantization"} | dict(
        an_object(config, "quantization")
    )


def _supported(algorithm: Any, name: str) -> str:
    if str(algorithm).upper() not in ALGORITHMS:
        supported = ", ".join((*ALGORITHMS, MIXED))
        raise ModelError(
            f"{KEY} of ModelOpt ({CONFIG} or {FILE}): {name} is {algorithm!r}, supported are {supported}; others scale"
            " activations or pack integers in a way of their own"
        )
    return str(algorithm).upper()
