"""Matrices of 8-bit floats (e4m3) with their scales, read as float32 for devices that cannot multiply them, or as
they are stored. Independent of models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.dtypes import E8M0_VALUES, FP8_BLOCK, FP8_VALUES
from engine.models.config_fields import ModelError
from engine.models.stored_tensors import StoredTensor, slices
from engine.models.weights import AxisShard

FP8, E8M0 = "F8_E4M3", "F8_E8M0"  # as safetensors spells them; safetensors cannot convert them to numpy
SCALES = ("_scale", "_scale_inv")  # suffixes of names; the numbers are multiplied by either kind of scale
# Not used, since activations are not quantized
NOT_NEEDED = (".input_scale", ".input_scale_ub", ".input_zero_point", ".activation_scale")


@dataclass(frozen=True, eq=False)
class Fp8Tensor:
    """A tensor of 8-bit floats, as bytes (uint8), without its scales; or scales that are powers of two (E8M0)."""

    numbers: np.ndarray
    dtype: str = FP8

    def get_dtype(self) -> str:
        return self.dtype

    def get_shape(self) -> list[int]:
        return list(self.numbers.shape)

    def __getitem__(self, key: Any) -> np.ndarray:
        return self.numbers[key]


@dataclass(frozen=True, eq=False)
class ScaledFp8Tensor:
    """A matrix of 8-bit floats that reads as float32. Each scale applies to a block of `sides` (rows, columns)."""

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
        return FP8_VALUES[self.numbers[keys]] * self.scale[rows[:, None], columns]

    def share(self, rows: AxisShard, columns: AxisShard) -> tuple[np.ndarray, np.ndarray]:
        """Return a rank's part for `linear_fp8`: numbers u8 [N, K] and scales f32 [N, 1 or K / 128], padded with zeros.

        Raises ModelError if the columns have several scales, but do not begin at a block of 128.
        """
        numbers = np.zeros((rows.size, columns.size), np.uint8)
        numbers[: rows.stop - rows.start, : columns.stop - columns.start] = self.numbers[
            rows.start : rows.stop, columns.start : columns.stop
        ]
        first, last = (column // self.sides[1] for column in (columns.start, max(columns.stop, columns.start + 1) - 1))
        if first != last and columns.start % FP8_BLOCK:
            raise ModelError(f"columns from {columns.start} on do not begin a block of {FP8_BLOCK}")
        num_groups = 1 if first == last else -(-columns.size // FP8_BLOCK)
        scale = np.zeros((rows.size, num_groups), np.float32)
        of_rows = self.scale[np.arange(rows.start, rows.stop) // self.sides[0], first : last + 1]
        scale[: len(of_rows), : of_rows.shape[1]] = of_rows
        return numbers, scale


def stacked(shares: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers and scales of one matrix that stacks the rows of several."""
    num_groups = max(scale.shape[1] for _, scale in shares)
    scales = [np.broadcast_to(scale, (len(scale), num_groups)) for _, scale in shares]
    return np.concatenate([numbers for numbers, _ in shares]), np.concatenate(scales)


def fp8_bytes(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of 8-bit floats in a valid safetensors file by name, memory-mapped."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)  # null is valid, too
    found = {name: each for name, each in header.items() if each["dtype"] in (FP8, E8M0)}
    starts = {name: 8 + size + each["data_offsets"][0] for name, each in found.items()}
    return {
        name: Fp8Tensor(np.memmap(path, np.uint8, "r", starts[name], tuple(each["shape"])), each["dtype"])
        for name, each in found.items()
    }


def with_fp8(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors with each matrix of 8-bit floats combined with its scales.

    Raises ModelError if scales are missing or have a shape that is not supported.
    """
    made = dict(tensors)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Fp8Tensor) or tensor.dtype != FP8:
            continue
        if tensor.numbers.ndim != 2:  # noqa: PLR2004 - rows and columns
            raise ModelError(f"tensor {name} of 8-bit floats has shape {tensor.numbers.shape}, supported are matrices")
        scales = [f"{name}{end}" for end in SCALES if f"{name}{end}" in tensors]
        if not scales:
            raise ModelError(f"tensor {name} has 8-bit floats, but no {name}{SCALES[0]}")
        stored = made.pop(scales[0])
        scale = E8M0_VALUES[stored[...]] if stored.get_dtype() == E8M0 else np.asarray(stored[...], np.float32)
        made[name] = _scaled(name, tensor.numbers, scale)
        for end in NOT_NEEDED:
            made.pop(name.removesuffix(".weight") + end, None)
    return made


def _scaled(name: str, numbers: np.ndarray, scale: np.ndarray) -> ScaledFp8Tensor:
    rows, columns = numbers.shape
    if scale.ndim == 4 and scale.shape[1::2] == (1, 1):  # ModelOpt has an axis for the rows and columns of a block
        scale = scale[:, 0, :, 0]
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    for shape, sides in (((1, 1), (rows, columns)), ((rows, 1), (1, columns)), (blocks, (FP8_BLOCK, FP8_BLOCK))):
        if scale.size == shape[0] * shape[1] and (scale.shape == shape or scale.ndim < 2):
            return ScaledFp8Tensor(numbers, scale.reshape(shape), sides)
    raise ModelError(
        f"tensor {name} of shape {numbers.shape} has scales of shape {scale.shape}, supported are one, one a row and"
        f" one for {FP8_BLOCK} x {FP8_BLOCK}"
    )
