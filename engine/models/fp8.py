"""Matrices of 8-bit floats (e4m3) with their scales, as the numbers they stand for: no CPU multiplies with them, and
what the graph stores instead is for the export to decide. Knows names of tensors and safetensors files, no model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from engine.models.keys import ModelError
from engine.models.stored import Stored, slices

FP8 = "F8_E4M3"  # as safetensors spells it, which cannot give it to numpy
BLOCK = 128  # rows and columns that share a scale, where neither a row nor all do
VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
SCALES = ("_scale", "_scale_inv")  # both are multiplied with
NOT_NEEDED = (".input_scale", ".input_scale_ub", ".input_zero_point")  # activations are not rounded


@dataclass(frozen=True, eq=False)
class Bytes:
    """A tensor of 8-bit floats as it is stored."""

    numbers: np.ndarray

    def get_dtype(self) -> str:
        return FP8

    def get_shape(self) -> list[int]:
        return list(self.numbers.shape)

    def __getitem__(self, key: Any) -> np.ndarray:
        return self.numbers[key]


@dataclass(frozen=True, eq=False)
class Scaled:
    """A matrix of them, with a scale for each `sides` rows and columns."""

    numbers: np.ndarray
    scale: np.ndarray
    sides: tuple[int, int]

    def get_dtype(self) -> str:
        return "F32"

    def get_shape(self) -> list[int]:
        return list(self.numbers.shape)

    def __getitem__(self, key: Any) -> np.ndarray:
        keys = slices(key, self.numbers.shape)
        rows, columns = (np.arange(k.start, k.stop) // side for k, side in zip(keys, self.sides, strict=True))
        return VALUES[self.numbers[keys]] * self.scale[rows[:, None], columns]


def fp8_bytes(path: Path) -> dict[str, Stored]:
    """Those of a safetensors file that is known to be one."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    found = {name: each for name, each in header.items() if each.get("dtype") == FP8}
    return {
        name: Bytes(np.memmap(path, np.uint8, "r", 8 + size + each["data_offsets"][0], tuple(each["shape"])))
        for name, each in found.items()
    }


def with_fp8(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Every matrix of 8-bit floats with its scales in it."""
    made = dict(tensors)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Bytes):
            continue
        scales = [f"{name}{end}" for end in SCALES if f"{name}{end}" in tensors]
        if not scales:
            raise ModelError(f"tensor {name} has 8-bit floats, but no {name}{SCALES[0]}")
        made[name] = _scaled(name, tensor.numbers, np.asarray(made.pop(scales[0])[...], np.float32))
        for end in NOT_NEEDED:
            made.pop(name.removesuffix(".weight") + end, None)
    return made


def _scaled(name: str, numbers: np.ndarray, scale: np.ndarray) -> Scaled:
    rows, columns = numbers.shape
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    for shape, sides in (((1, 1), (rows, columns)), ((rows, 1), (1, columns)), (blocks, (BLOCK, BLOCK))):
        if scale.size == shape[0] * shape[1] and (scale.shape == shape or scale.ndim < 2):
            return Scaled(numbers, scale.reshape(shape), sides)
    raise ModelError(
        f"tensor {name} of shape {numbers.shape} has scales of shape {scale.shape}, supported are one, one a row and"
        f" one for {BLOCK} x {BLOCK}"
    )
