"""The types of tensors by their names here, which are numpy's and bfloat16.

bfloat16, which numpy lacks, travels as the uint16 with the same bits.
"""

from __future__ import annotations

import numpy as np

WEIGHT_DTYPES = ("float32", "bfloat16")  # of an exported model's matrices and KV cache


def held_as(name: str) -> np.dtype:
    """What numpy holds it in."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to bf16 bits, to nearest, ties to even; a NaN stays a NaN."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nans = np.isnan(values)  # the sum may carry one over into a number
    rounded[nans] = (bits[nans] >> 16) | 0x40
    return rounded


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_f32(array: np.ndarray) -> np.ndarray:
    return from_bf16(array) if array.dtype == np.uint16 else array
