"""Matrices of 4-bit floats (e2m1) with a scale for each group of a row, read as float32: MXFP4 and NVFP4.

Independent of models and files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.dtypes import E8M0_VALUES, FP4_PAIRS, FP8_VALUES
from engine.models.config_fields import ModelError
from engine.models.fp8 import Fp8Tensor
from engine.models.stored_tensors import StoredTensor, slices

PACKED, SCALE, FACTOR, DIVISOR = "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale"
NOT_NEEDED = ("input_scale", "input_global_scale")  # not used, since activations are not quantized
SIZES = {"U8": 32, "F8_E4M3": 16}  # dtype of the scales -> elements that share one: MXFP4, NVFP4


@dataclass(frozen=True, eq=False)
class Fp4:
    """A matrix of 4-bit floats that reads as float32. Each scale applies to a group of a row."""

    packed: StoredTensor  # u8 [N, K / 2]
    scale: np.ndarray  # f32 [N, K / group]

    def get_dtype(self) -> str:
        return "BF16"  # the dtype that holds these numbers almost exactly

    def get_shape(self) -> list[int]:
        rows, half = self.packed.get_shape()
        return [rows, 2 * half]

    def __getitem__(self, key: Any) -> np.ndarray:
        rows, columns = slices(key, self.get_shape())
        group = self.get_shape()[1] // self.scale.shape[1]
        values = FP4_PAIRS[self.packed[rows]].reshape(rows.stop - rows.start, -1, group) * self.scale[rows][..., None]
        return values.reshape(len(values), -1)[:, columns]


def with_fp4(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors with each matrix of 4-bit floats combined with its scales, under the name `<layer>.weight`.

    Raises ModelError if scales are missing or have a shape that is not supported.
    """
    made = dict(tensors)
    for name, tensor in tensors.items():
        layer, _, end = name.rpartition(".")
        is_packed = end == PACKED or (end == "weight" and f"{layer}.{FACTOR}" in tensors)
        if not is_packed or tensor.get_dtype() != "U8":
            continue
        parts = {each: made.pop(f"{layer}.{each}", None) for each in (end, SCALE, FACTOR, DIVISOR, *NOT_NEEDED)}
        if parts[SCALE] is None:
            raise ModelError(f"tensor {name} has 4-bit floats, but no {layer}.{SCALE}")
        made[f"{layer}.weight"] = Fp4(tensor, _scales(name, tensor, parts))
    return made


def _scales(name: str, packed: StoredTensor, parts: Mapping[str, Any]) -> np.ndarray:
    """Return the scales of all groups, multiplied by the scale of the whole matrix."""
    scale = parts[SCALE]
    rows, half = packed.get_shape()
    size = SIZES.get(scale.get_dtype())
    if size is None or list(scale.get_shape()) != [rows, 2 * half // size]:
        raise ModelError(
            f"tensor {name} of {rows} x {2 * half} 4-bit floats has scales of dtype {scale.get_dtype()} and shape"
            f" {tuple(scale.get_shape())}, supported are bytes for 32 elements (MXFP4) and 8-bit floats for 16 (NVFP4)"
        )
    if size == SIZES["U8"]:
        return E8M0_VALUES[scale[...]]
    if (parts[FACTOR] is None) == (parts[DIVISOR] is None):
        raise ModelError(f"tensor {name} needs either a {FACTOR} or a {DIVISOR} beside it")
    values = FP8_VALUES[scale.numbers if isinstance(scale, Fp8Tensor) else scale[...]]
    if parts[DIVISOR] is not None:
        return values / np.float32(np.asarray(parts[DIVISOR][...]).reshape(()))
    return values * np.float32(np.asarray(parts[FACTOR][...]).reshape(()))
