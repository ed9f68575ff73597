"""Readers of GPTQ (4 and 8 bits) and AWQ (4 bits). Independent of files and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engine.models.config_fields import ModelError, an_object
from engine.models.quantize import Codes
from engine.models.quantized_tensors import KEY, WIDER, Quantization, Tensors, group_of, need, unpack

ENDS = ("qweight", "qzeros", "scales")


def gptq(config: Mapping[str, Any]) -> tuple[Quantization, ...]:
    """Return the quantizations of a GPTQ checkpoint, those of single layers (`dynamic` of GPTQModel) first.

    `dynamic` has options by patterns of names: `+:`, or no prefix, changes options of these layers, and the layers of
    `-:` are not quantized, which their tensors show. Raises ModelError if a quantization is not supported.
    """
    dynamic = an_object(config, "dynamic")
    named = {name.removeprefix("+:"): an_object(dynamic, name) for name in dynamic if not name.startswith("-:")}
    of_layers = [replace(_gptq({**config, **own}), targets=(f"re:{pattern}",)) for pattern, own in named.items()]
    return (*of_layers, _gptq(config))


def _gptq(config: Mapping[str, Any]) -> Quantization:
    need(config, "gptq", bits=(4, 8), checkpoint_format=("gptq", "gptq_v2", None))
    bits, is_v2 = config["bits"], config.get("checkpoint_format") == "gptq_v2"
    middle, size = 1 << (bits - 1), config.get("group_size", 128)
    stored_middle = middle if is_v2 else middle - 1
    wrong_zero = middle - 1 if is_v2 else middle + 1

    def read(tensors: Tensors) -> Codes:
        codes = unpack(tensors["qweight"], axis=0, bits=bits)
        zero = unpack(tensors["qzeros"], axis=1, bits=bits).astype(np.int16) + (0 if is_v2 else 1)
        if (zero == wrong_zero).all():
            written, named = ("gptq", "gptq_v2") if is_v2 else ("gptq_v2", "gptq")
            raise ModelError(
                f"all of its zero points are {wrong_zero} when read as checkpoint_format {named!r}: its zeros are"
                f" stored as {written!r} has them, so config.json must say so in {KEY}.checkpoint_format"
            )
        scale, g_idx = tensors["scales"].astype(np.float32).T, tensors.get("g_idx")
        order = group_of(g_idx, len(codes) if size == -1 else size)
        if order is not None and not (0 <= order.min() and order.max() < scale.shape[1]):
            raise ModelError(
                f"its g_idx has groups {order.min()} to {order.max()}, but {scale.shape[1]} scales per row"
            )
        if bits == 8:
            return Codes((codes.T.astype(np.int16) - 128).astype(np.int8), scale, zero.T - 128, order)
        return Codes(codes.T, scale, zero.T.astype(np.uint8), order)

    quant_type = "weight_only_int4" if bits == 4 else WIDER
    inexact = "gptq of 8 bits in groups" if bits == 8 and size != -1 else ""
    word = int.from_bytes(bytes([stored_middle << 4 | stored_middle if bits == 4 else stored_middle] * 4), "little")
    return Quantization(
        "gptq", quant_type, not config.get("sym", True), size, ENDS, read, ("g_idx",), word, inexact=inexact
    )


def awq(config: Mapping[str, Any]) -> Quantization:
    """Return the quantization of an AWQ checkpoint. Raises ModelError if it is not supported."""
    need(config, "awq", bits=(4,), version=("gemm", "GEMM", "gemv", "GEMV", None))
    size = config.get("group_size", 128)

    def read(tensors: Tensors) -> Codes:
        codes, zero = (_in_order_of_awq(unpack(tensors[end], axis=1)) for end in ("qweight", "qzeros"))
        return Codes(codes.T, tensors["scales"].astype(np.float32).T, zero.T)

    def read_gemv(tensors: Tensors) -> Codes:
        """Read a layer whose matrices are not transposed, with zero points and scales padded to whole words."""
        codes, zero = (unpack(tensors[end], axis=1) for end in ("qweight", "qzeros"))
        num_groups = 1 if size == -1 else codes.shape[1] // size
        return Codes(codes, tensors["scales"].astype(np.float32)[:, :num_groups], zero[:, :num_groups])

    is_gemv = str(config.get("version")).lower() == "gemv"
    return Quantization("awq", "weight_only_int4", True, size, ENDS, read_gemv if is_gemv else read)


def _in_order_of_awq(numbers: np.ndarray) -> np.ndarray:
    """Reorder the eight numbers of each word of AWQ: number i belongs to column (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    eights = numbers.reshape(len(numbers), -1, 8)
    return eights[..., np.argsort([0, 2, 4, 6, 1, 3, 5, 7])].reshape(numbers.shape)
