"""Reader of compressed-tensors: integers of 8 and 4 bits, and checks of its 8-bit and 4-bit floats.

A checkpoint may have several groups of layers, each with a quantization of its own. Independent of files and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engine.dtypes import FP8_BLOCK
from engine.models.config_fields import ModelError, an_object
from engine.models.quantize import Codes
from engine.models.quantized_tensors import KEY, WIDER, Quantization, Tensors, group_of, need, unpack

FP4_FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")


def compressed_tensors(config: Mapping[str, Any]) -> tuple[Quantization, ...]:
    """Return the quantizations of the groups of integers, those for single layers first.

    The tensors of groups of floats are recognised by their dtypes. Raises ModelError for groups that are not supported.
    """
    named = an_object(config, "config_groups")
    groups = [an_object(named, name) for name in named]
    sparsity = an_object(config, "sparsity_config")
    if not groups or sparsity.get("format", "dense") != "dense":  # dense: the zeros are stored like other numbers
        raise ModelError(
            f"config.json: {KEY}: config_groups must be given, and the format of sparsity_config is"
            f" {sparsity.get('format')!r}, supported is 'dense'"
        )
    found = [made for group in groups if (made := _group(group, str(group.get("format") or config.get("format"))))]
    return tuple(sorted(found, key=lambda each: "Linear" in each.targets))


def is_fp4(config: Mapping[str, Any]) -> bool:
    """Return whether one of the groups consists of 4-bit floats."""
    return any(weights.get("type") == "float" and weights.get("num_bits") == 4 for weights in parts(config, "weights"))


def parts(config: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return one part of all groups: `weights` or `input_activations`. Raises ModelError for other values."""
    groups = an_object(config, "config_groups")
    return [an_object(an_object(groups, key), name) for key in groups]


def _group(group: Mapping[str, Any], layout: str) -> Quantization | None:
    weights, inputs = an_object(group, "weights"), an_object(group, "input_activations")
    if weights.get("type") == "float":
        _check_floats(weights, layout)
        return None
    targets = tuple(str(target) for target in group.get("targets") or ("Linear",))
    _check_whole_numbers(weights, inputs)
    if inputs or layout == "int-quantized":
        made = "a8w8" if inputs else WIDER
        ends, unused = ("weight", "weight_scale"), ("input_scale", "input_zero_point")
        return Quantization("compressed-tensors", made, False, -1, ends, as_stored, unused, targets=targets)
    need({"format": layout}, "compressed-tensors", format=("pack-quantized",))
    return replace(_packed(weights), targets=targets)


def _check_floats(weights: Mapping[str, Any], layout: str) -> None:
    if weights.get("num_bits") == 4:
        need({"format": layout}, "compressed-tensors weights of 4-bit floats", format=FP4_FORMATS)
        return
    blocks = (f"{FP8_BLOCK}x{FP8_BLOCK}", [FP8_BLOCK, FP8_BLOCK], None)
    known = {"num_bits": (8,), "strategy": ("tensor", "channel", "block"), "block_structure": blocks}
    need(weights, "compressed-tensors weights of floats", **known)


def _check_whole_numbers(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    order = (None, False, "weight", "static", "group", "dynamic", True)
    need(weights, "compressed-tensors weights", type=("int",), num_bits=(4, 8), actorder=order)
    if weights["num_bits"] == 8:
        strategy = ("channel", "tensor", *(() if inputs else ("group",)))
        need(weights, "compressed-tensors weights of 8 bits", strategy=strategy, symmetric=(True,))
    elif inputs or weights.get("strategy") not in ("group", "channel"):
        what = f"weights of 4 bits by {weights.get('strategy')!r} with inputs {dict(inputs)}"
        raise ModelError(f"config.json: {KEY}: {what} are not supported")
    if inputs:
        by = {"strategy": ("token",) if inputs.get("dynamic") else ("tensor", "token"), "symmetric": (True,)}
        need(inputs, "compressed-tensors input_activations", type=("int",), num_bits=(8,), **by)


def _packed(weights: Mapping[str, Any]) -> Quantization:
    """Return the quantization of weights that are packed, several codes per int32 word."""
    bits, size = weights["num_bits"], weights.get("group_size") or -1
    size = 0 if weights.get("strategy") == "tensor" else size
    has_zero = not weights.get("symmetric", True)

    def read(tensors: Tensors) -> Codes:
        rows, width = (int(size) for size in tensors["weight_shape"])
        codes, zero = unpack(tensors["weight_packed"], axis=1, bits=bits)[:, :width], tensors.get("weight_zero_point")
        if has_zero != (zero is not None):
            found = "has no weight_zero_point" if has_zero else "has a weight_zero_point"
            raise ModelError(f"it {found}, but config.json: {KEY}: symmetric of its weights is {not has_zero}")
        scale = _of_rows(tensors["weight_scale"], rows)
        order = group_of(tensors.get("weight_g_idx"), width if size < 1 else size)
        if bits == 8:
            return Codes((codes.astype(np.int16) - 128).astype(np.int8), scale, None, order)
        if zero is not None:
            zero = unpack(zero, axis=0)[:rows] if zero.dtype == np.int32 else (zero + 8).astype(np.uint8)
        return Codes(codes, scale, zero, order)

    layout, optional = WIDER if bits == 8 else "weight_only_int4", ("weight_zero_point", "weight_g_idx")
    ends = ("weight_packed", "weight_scale", "weight_shape")
    inexact = "compressed-tensors of 8 bits in groups" if bits == 8 and size > 0 else ""
    return Quantization("compressed-tensors", layout, has_zero, size, ends, read, optional, inexact=inexact)


def as_stored(tensors: Tensors) -> Codes:
    """Return the codes of a layer that is stored as `weight` and `weight_scale`, without packing."""
    return Codes(tensors["weight"], _of_rows(tensors["weight_scale"], len(tensors["weight"])))


def _of_rows(scale: np.ndarray, num_rows: int) -> np.ndarray:
    """Return the scales as f32 [N, groups]. A single scale is that of all rows."""
    scale = scale.astype(np.float32)
    if scale.size == 1:
        return np.full((num_rows, 1), scale.reshape(()), np.float32)
    return scale if scale.ndim == 2 else scale.reshape(-1, 1)
