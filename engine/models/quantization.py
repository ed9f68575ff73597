"""Reads a checkpoint's quantization_config, and the tensors that store its quantized linear layers.

Supported are compressed-tensors (8-bit weights, with or without 8-bit activations; 4-bit weights in groups), GPTQ and
AWQ (4-bit weights). fp8.py reads 8-bit floats. ModelError reports every other variant, and a checkpoint whose tensors
contradict its config. Independent of files and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.dtypes import CODES_PER_SCALE, FP8_BLOCK, SMALL_GROUP
from engine.models.keys import ModelError, an_object
from engine.models.quantize import Codes
from engine.models.stored import Stored

KEY = "quantization_config"
Tensors = Mapping[str, np.ndarray]  # the tensors of one layer, by the suffixes of their names


@dataclass(frozen=True)
class Quantization:
    """Storage of the quantized linear layers of a checkpoint.

    Layers without the tensors in `ends` are not quantized.
    """

    method: str  # quant_method, for messages
    format: str  # a key of engine.models.formats.FORMATS
    has_zero: bool
    group_size: int  # inputs per scale; -1: a whole row; 0: the config does not say
    ends: tuple[str, ...]  # suffixes of the names of a layer's tensors; the first has the codes: `<layer>.qweight`
    read: Callable[[Tensors], Codes]
    optional: tuple[str, ...] = ()
    symmetric_word: int | None = None  # value of all words of `qzeros` if the zero points are symmetric

    def num_groups(self, num_columns: int) -> int:
        """Return how many scales a row of `num_columns` weights must have, or 0 if the config does not say."""
        if self.group_size < 1:
            return -self.group_size
        return -(-num_columns // self.group_size)

    def with_zeros_of(self, tensors: Mapping[str, Stored]) -> Quantization:
        """Return this quantization with `has_zero` as the tensors have it, since configs may omit or misstate `sym`."""
        if self.has_zero or self.symmetric_word is None:
            return self
        zeros = (tensor[:] for name, tensor in tensors.items() if name.endswith(".qzeros"))
        word = np.uint32(self.symmetric_word)
        return replace(self, has_zero=any((words.view(np.uint32) != word).any() for words in zeros))


def read_quantization(keys: Mapping[str, Any]) -> Quantization | None:
    """Return the quantization of a checkpoint, or None if its weights are floats, including 8-bit floats (fp8.py).

    Raises ModelError if the quantization is not supported.
    """
    config = an_object(keys, KEY)
    if not config:
        return None
    method = config.get("quant_method", "unknown")
    if method not in [*METHODS]:  # config.json may have a value of any type
        raise ModelError(
            f"config.json: {KEY}.quant_method is {method!r}, supported are {', '.join(METHODS)}, and plain weights"
        )
    quantization = METHODS[method](config)
    if quantization is None:
        return None
    size = quantization.group_size
    if size != -1 and (size < 1 or size % SMALL_GROUP):
        raise ModelError(f"config.json: {KEY}: the group size is {size}, supported are multiples of {SMALL_GROUP}, -1")
    if size != -1 and size % CODES_PER_SCALE:
        return replace(quantization, format="weight_only_int4_g32")
    return quantization


def is_fp8(keys: Mapping[str, Any]) -> bool:
    """Return whether quantization_config declares 8-bit floats.

    Unknown methods return False, since exports of other programs use the same key for something else.
    """
    return an_object(keys, KEY).get("quant_method") in [*METHODS] and read_quantization(keys) is None


def _gptq(config: Mapping[str, Any]) -> Quantization:
    _need(config, "gptq", bits=(4,), checkpoint_format=("gptq", "gptq_v2", None))
    is_v2 = config.get("checkpoint_format") == "gptq_v2"
    zero_offset, wrong_zero = (0, 7) if is_v2 else (1, 9)

    def read(tensors: Tensors) -> Codes:
        codes, zero = unpack(tensors["qweight"], axis=0), unpack(tensors["qzeros"], axis=1) + np.uint8(zero_offset)
        if (zero == wrong_zero).all():
            written, named = ("gptq", "gptq_v2") if is_v2 else ("gptq_v2", "gptq")
            raise ModelError(
                f"all of its zero points are {wrong_zero} when read as checkpoint_format {named!r}: its zeros are"
                f" stored as {written!r} has them, so config.json must say so in {KEY}.checkpoint_format"
            )
        _check_order(tensors.get("g_idx"), len(codes), len(tensors["scales"]))
        return Codes(codes.T, _floats(tensors["scales"]).T, zero.T)

    ends, has_zero = ("qweight", "qzeros", "scales"), not config.get("sym", True)
    size, word = config.get("group_size", 128), 0x88888888 if is_v2 else 0x77777777
    return Quantization("gptq", "weight_only_int4", has_zero, size, ends, read, ("g_idx",), word)


def _check_order(g_idx: np.ndarray | None, num_inputs: int, num_groups: int) -> None:
    """Raise ModelError unless each group consists of consecutive inputs. A `g_idx` of only -1 counts as not set."""
    in_order = np.arange(num_inputs) // max(1, num_inputs // num_groups)
    if g_idx is not None and not (np.array_equal(g_idx, in_order) or (g_idx == -1).all()):
        raise ModelError("its groups are not in the order of the inputs (desc_act), which is not supported")


def _awq(config: Mapping[str, Any]) -> Quantization:
    _need(config, "awq", bits=(4,), version=("gemm", "GEMM", None))

    def read(tensors: Tensors) -> Codes:
        codes, zero = (_in_order_of_awq(unpack(tensors[end], axis=1)) for end in ("qweight", "qzeros"))
        return Codes(codes.T, _floats(tensors["scales"]).T, zero.T)

    size = config.get("group_size", 128)
    return Quantization("awq", "weight_only_int4", True, size, ("qweight", "qzeros", "scales"), read)


def _fp8(config: Mapping[str, Any]) -> None:
    """Check a config of 8-bit floats. Its settings for activations are ignored, since activations are not quantized."""
    _need(config, "fp8", fmt=("e4m3", None), weight_block_size=([FP8_BLOCK, FP8_BLOCK], None))


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization | None:
    groups = list(an_object(config, "config_groups").values())
    if len(groups) != 1 or config.get("kv_cache_scheme") is not None or config.get("sparsity_config"):
        what = "one group in config_groups, no kv_cache_scheme and no sparsity_config are supported"
        raise ModelError(f"config.json: {KEY}: {what}")
    weights, inputs = an_object(groups[0], "weights"), an_object(groups[0], "input_activations")
    if weights.get("type") == "float":
        blocks = (f"{FP8_BLOCK}x{FP8_BLOCK}", [FP8_BLOCK, FP8_BLOCK], None)
        known = {"num_bits": (8,), "strategy": ("tensor", "channel", "block"), "block_structure": blocks}
        _need(weights, "compressed-tensors weights of floats", **known)
        return None
    _check_whole_numbers(weights, inputs)
    if inputs or config.get("format") == "int-quantized":
        form = "a8w8" if inputs else "weight_only_int8"
        return Quantization("compressed-tensors", form, False, -1, ("weight", "weight_scale"), as_stored)
    _need(config, "compressed-tensors", format=("pack-quantized",))
    return _packed(weights)


def _check_whole_numbers(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    order = (None, False, "weight", "static")
    _need(weights, "compressed-tensors weights", type=("int",), num_bits=(4, 8), actorder=order)
    if weights["num_bits"] == 8:
        _need(weights, "compressed-tensors weights of 8 bits", strategy=("channel",), symmetric=(True,))
    elif inputs or weights.get("strategy") not in ("group", "channel"):
        what = f"weights of 4 bits by {weights.get('strategy')!r} with inputs {dict(inputs)}"
        raise ModelError(f"config.json: {KEY}: {what} are not supported")
    if inputs:
        by_token = {"dynamic": (True,), "strategy": ("token",), "symmetric": (True,)}
        _need(inputs, "compressed-tensors input_activations", type=("int",), num_bits=(8,), **by_token)


def _packed(weights: Mapping[str, Any]) -> Quantization:
    """Return the quantization of weights that are packed, several codes per int32 word."""
    bits, size = weights["num_bits"], weights.get("group_size") or -1

    def read(tensors: Tensors) -> Codes:
        rows, width = (int(size) for size in tensors["weight_shape"])
        codes, zero = unpack(tensors["weight_packed"], axis=1, bits=bits)[:, :width], tensors.get("weight_zero_point")
        if has_zero != (zero is not None):
            found = "has no weight_zero_point" if has_zero else "has a weight_zero_point"
            raise ModelError(f"it {found}, but config.json: {KEY}: symmetric of its weights is {not has_zero}")
        _check_order(tensors.get("weight_g_idx"), width, tensors["weight_scale"].shape[1])
        if bits == 8:
            return Codes((codes.astype(np.int16) - 128).astype(np.int8), _floats(tensors["weight_scale"]))
        if zero is not None:
            zero = unpack(zero, axis=0)[:rows] if zero.dtype == np.int32 else (zero + 8).astype(np.uint8)
        return Codes(codes, _floats(tensors["weight_scale"]), zero)

    form, has_zero = "weight_only_int8" if bits == 8 else "weight_only_int4", not weights.get("symmetric", True)
    ends, optional = ("weight_packed", "weight_scale", "weight_shape"), ("weight_zero_point", "weight_g_idx")
    return Quantization("compressed-tensors", form, has_zero, size, ends, read, optional)


METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization | None]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
}


def unpack(words: np.ndarray, axis: int, bits: int = 4) -> np.ndarray:
    """Return the unsigned numbers (u8) in int32 words, lowest bits first.

    The given axis becomes 32 / `bits` times as long.
    """
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    shape = [size * (len(shifts) if i == axis else 1) for i, size in enumerate(words.shape)]
    return np.moveaxis(numbers, -1, axis + 1).reshape(shape).astype(np.uint8)


def _in_order_of_awq(numbers: np.ndarray) -> np.ndarray:
    """Reorder the eight numbers of each word of AWQ: number i belongs to column (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    eights = numbers.reshape(len(numbers), -1, 8)
    return eights[..., np.argsort([0, 2, 4, 6, 1, 3, 5, 7])].reshape(numbers.shape)


def as_stored(tensors: Tensors) -> Codes:
    """Return the codes of a layer that is stored as `weight` and `weight_scale`, without packing."""
    scale = _floats(tensors["weight_scale"])
    return Codes(tensors["weight"], scale if scale.ndim == 2 else scale.reshape(-1, 1))


def _floats(scale: np.ndarray) -> np.ndarray:
    return scale.astype(np.float32)


def _need(config: Mapping[str, Any], what: str, **supported: tuple[Any, ...]) -> None:
    for name, values in supported.items():
        if config.get(name) not in values:
            listed = ", ".join(repr(value) for value in values if value is not None)
            raise ModelError(f"config.json: {KEY}: {name} of {what} is {config.get(name)!r}, supported is {listed}")
