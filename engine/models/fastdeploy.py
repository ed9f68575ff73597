"""Reads the matrices of a checkpoint in Paddle's format that FastDeploy has quantized as `wint8` or `wint4`.

The codes of a layer are `<layer>.quant_weight`, in the layout of Paddle's `weight_quantize` for GPUs, and
`<layer>.weight_scale` has one scale per output. Both kinds may be in one checkpoint (`mix_quant`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.models.config_fields import ModelError
from engine.models.paddle_packed import packed
from engine.models.quantize import Codes
from engine.models.quantized_tensors import Quantization, need
from engine.models.stored_tensors import StoredTensor, slices

CODES, SCALE = "quant_weight", "weight_scale"  # ends of the names of a layer's tensors
TYPES = ("wint8", "wint4", None)
FORMATS = {8: "weight_only_int8", 4: "weight_only_int4"}


@dataclass(frozen=True, eq=False)
class FastDeployMatrix:
    """A matrix [N, K] of the outputs in `spans` of a layer that FastDeploy has quantized."""

    name: str  # of the tensor with the codes, for messages
    stored: StoredTensor  # int8 [outputs, K], or [outputs / 2, K] with 4 bits
    scale: StoredTensor  # [outputs]
    spans: Sequence[tuple[int, int]]
    has_zero = False
    inexact = ""

    @property
    def format(self) -> str:
        rows, outputs = self.stored.get_shape()[0], self.scale.get_shape()[0]
        return FORMATS[8 if rows == outputs else 4]

    def get_dtype(self) -> str:
        return "BF16"  # of the matrix before it was quantized

    def get_shape(self) -> list[int]:
        return [sum(stop - start for start, stop in self.spans), self.stored.get_shape()[1]]

    def __getitem__(self, key: Any) -> np.ndarray:
        return self.codes().values()[slices(key, self.get_shape())]

    def codes(self) -> Codes:
        scale = self.scale[:].astype(np.float32)
        matrix = packed(self.stored[:], scale, self.get_shape()[1])
        every = slice(None)
        parts = [matrix[start:stop, every] for start, stop in self.spans]
        return Codes(np.concatenate(parts), np.concatenate([scale[start:stop, None] for start, stop in self.spans]))


def fastdeploy(config: Mapping[str, Any]) -> tuple[Quantization, ...]:
    """Check the quantization_config. The matrices are recognised by their tensors. Raises ModelError."""
    need(config, "FastDeploy", quantization=("wint8", "wint4", "weight_only", "mix_quant", None))
    need(config, "FastDeploy", dense_quant_type=TYPES, moe_quant_type=TYPES)
    return ()


def matrix_of(layer: str, tensors: Mapping[str, StoredTensor]) -> FastDeployMatrix:
    """Return the matrix of a quantized layer with all of its outputs. Raises ModelError."""
    name = f"{layer}.{CODES}"
    if missing := [end for end in (CODES, SCALE) if f"{layer}.{end}" not in tensors]:
        raise ModelError(f"tensor {layer}.{missing[0]} is missing in the checkpoint")
    codes, scale = tensors[name], tensors[f"{layer}.{SCALE}"]
    shapes = codes.get_shape(), scale.get_shape()
    fits = codes.get_dtype() == "I8" and [len(shape) for shape in shapes] == [2, 1]
    if not fits or shapes[1][0] not in (shapes[0][0], 2 * shapes[0][0]):
        what = f"{codes.get_dtype()} of shape {shapes[0]} with scales of shape {shapes[1]}"
        raise ModelError(f"tensor {name} is {what}, supported are 8 or 4 bits with one scale per output")
    return FastDeployMatrix(name, codes, scale, ((0, shapes[1][0]),))
