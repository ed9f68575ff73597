"""The types of tensors by their names here, which are numpy's and bfloat16.

The ops take bfloat16, which numpy has only with ml_dtypes, as the uint16 with the same bits.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

WEIGHT_DTYPES = ("float32", "bfloat16", "float16")  # of an exported model's matrices and KV cache
FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)  # of the bytes of e4m3
FP8_BLOCK = 128  # columns that share a scale, where a row of 8-bit floats has several
# Of numbers with 4 bits: how many have a scale of their own, and what the number of them in a row is a multiple of.
CODES_PER_SCALE, CODES_ALIGNED = 64, 128
SMALL_GROUP = 32  # the other number of them that may have a scale
FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = np.array(FP4_MAGNITUDES + tuple(-each for each in FP4_MAGNITUDES), np.float32)  # of the codes of e2m1
FP4_PAIRS = np.stack([np.tile(FP4_VALUES, 16), np.repeat(FP4_VALUES, 16)], axis=1)  # of a byte, the lower code first
E8M0_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)  # 2^(byte - 127)
MXFP4_GROUP = 32  # columns of 4-bit floats that share a power of two
LATENT_GROUP = 64  # elements that share a scale in an int8 cache of latent attention


def scale_bytes(cache_dtype: np.dtype | str) -> int:
    """Return the size in bytes of the bf16 scale at the end of each int8 key or value in a cache; 0 for other types."""
    return 2 if np.dtype(held_as(str(cache_dtype))) == np.int8 else 0


def latent_groups(latent_dim: int, rope_dim: int) -> list[slice]:
    """Return the elements of an int8 row of latent attention that share a bf16 scale."""
    starts = [*range(0, latent_dim, LATENT_GROUP), *range(latent_dim, latent_dim + rope_dim, LATENT_GROUP)]
    ends = [*starts[1:], latent_dim + rope_dim]
    return [slice(*each) for each in zip(starts, ends, strict=True)]


def held_as(name: str) -> np.dtype:
    """Return the NumPy type with which the ops store values of the type `name`: uint16 for bfloat16."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bf16 bits, to nearest, ties to even. NaN stays NaN."""
    with np.errstate(invalid="ignore"):
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return bits.view(ml_dtypes.bfloat16).astype(np.float32)


def as_f32(array: np.ndarray) -> np.ndarray:
    return from_bf16(array) if array.dtype == np.uint16 else array.astype(np.float32, copy=False)


def from_fp8(numbers: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Convert 8-bit floats u8 [N, K] with scales f32 [N, 1], or [N, K / 128] for blocks of 128 columns, to float32."""
    each = scale if scale.shape[1] == 1 else np.repeat(scale, FP8_BLOCK, axis=1)[:, : numbers.shape[1]]
    return FP8_VALUES[numbers] * each


def from_mxfp4(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Convert 4-bit floats u8 [.., K / 2], two per byte, with biased exponents u8 [.., K / 32] to float32."""
    values = FP4_PAIRS[codes].reshape(*scale.shape, MXFP4_GROUP) * E8M0_VALUES[scale][..., None]
    return values.reshape(*scale.shape[:-1], -1)
