"""From a matrix of weights, or from codes that somebody else has made of it, to codes of 8 or 4 bits and their scales,
as `linear_int8`, `linear_fp8` and `linear_int4` read them.

Plain numpy, on all cores, rows by rows so that little memory is needed beside the result. Knows no files and no graph.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from engine.dtypes import CODES_ALIGNED, CODES_PER_SCALE, SMALL_GROUP, from_bf16, to_bf16

AT_ONCE = 1 << 18  # elements: what is made of them fits in a cache
LARGEST_INT8, SMALLEST_INT4, LARGEST_FP8 = 127, -8, 448
SCALES_TRIED = np.linspace(0.8, 1.0, 9, dtype=np.float32)  # of int4: cutting off what is far out may be worth it


@dataclass(frozen=True)
class Codes:
    """A matrix [N, K] that was quantized before: (code - zero) * scale, one for each of a row's equal groups.
    Of 8 bits: int8, without zero. Of 4: 0 .. 15, zero 8 where none is given."""

    codes: np.ndarray
    scale: np.ndarray  # f32 [N, groups]
    zero: np.ndarray | None = None  # [N, groups]

    def __post_init__(self) -> None:
        if self.codes.shape[1] % self.scale.shape[1]:
            raise ValueError(
                f"a row has {self.codes.shape[1]} codes in {self.scale.shape[1]} groups of different sizes"
            )

    def values(self) -> np.ndarray:
        zero = np.float32(0 if self.codes.dtype == np.int8 else 8) if self.zero is None else self._each(self.zero)
        return (self.codes.astype(np.float32) - zero) * self._each(self.scale)

    def _each(self, of_groups: np.ndarray) -> np.ndarray:
        """For every element that of its group."""
        size = -(-self.codes.shape[1] // of_groups.shape[1])
        return np.repeat(of_groups.astype(np.float32), size, axis=1)[:, : self.codes.shape[1]]

    def part(self, rows: slice, columns: slice) -> Codes:
        """Columns of several groups have a scale each if they are of 8 bits, else one for 64, or for 32 where groups
        are no multiples of 64. They begin at a multiple of that."""
        codes, num_groups = self.codes[rows, columns], self.scale.shape[1]
        size = self.codes.shape[1] // num_groups
        group = min(columns.start // size, num_groups - 1)
        if columns.stop <= (group + 1) * size:
            one = slice(group, group + 1)
            return Codes(codes, self.scale[rows, one], None if self.zero is None else self.zero[rows, one])
        if codes.dtype == np.int8:
            return Codes(codes, self._each(self.scale)[rows, columns])
        unit = SMALL_GROUP if size % CODES_PER_SCALE else CODES_PER_SCALE
        if columns.start % unit:
            raise ValueError(f"columns from {columns.start} on do not begin a group of {unit}")
        some = slice(columns.start, columns.stop, unit)
        zero = None if self.zero is None else self._each(self.zero)[rows, some]
        return Codes(codes, self._each(self.scale)[rows, some], zero)

    def as_int4(self, has_zero: bool, group: int = CODES_PER_SCALE) -> tuple[np.ndarray, ...]:
        """Return the parameters of `linear_int4` with a scale for `group` codes."""
        packed = pack_int4(self.codes)
        num_groups = 2 * packed.shape[1] // group
        zero = np.full_like(self.scale, 8) if self.zero is None else self.zero.astype(np.float32)
        made = [packed]
        for of_groups in (self.scale, zero)[: 1 + has_zero]:
            one = of_groups.shape[1] == 1
            made.append(
                to_bf16(
                    np.pad(of_groups, ((0, 0), (0, num_groups - of_groups.shape[1])), "edge" if one else "constant")
                )
            )
        return tuple(made)


def to_int8(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 [N, K] and scales f32 [N]: the largest of a row becomes 127 or -127."""
    return _by_rows(matrix, _rows_to_int8)


def to_int4(matrix: np.ndarray, group: int = CODES_PER_SCALE) -> tuple[np.ndarray, np.ndarray]:
    """Codes [N, K' / 2], two a byte, and scales bf16 [N, K' / group], with K up to K' filled with zeros."""
    return _by_rows(matrix, partial(_rows_to_int4, group=group))


def to_fp8(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """8-bit floats (e4m3) as u8 [N, K] and scales f32 [N, 1]: the largest of a row becomes the largest there is."""
    return _by_rows(matrix, _rows_to_fp8)


def pack_int4(codes: np.ndarray) -> np.ndarray:
    """Codes 0 .. 15 [N, K], two a byte: the first in the lower half. Rows are filled up with zeros."""
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % CODES_ALIGNED)))
    return codes[:, ::2] | codes[:, 1::2] << 4


def _by_rows(matrix: np.ndarray, quantize: Callable) -> tuple[np.ndarray, np.ndarray]:
    at_once = max(1, AT_ONCE // max(1, matrix.shape[1]))
    with ThreadPoolExecutor() as threads:
        pieces = threads.map(
            lambda i: quantize(matrix[i : i + at_once].astype(np.float32)), range(0, len(matrix), at_once)
        )
        codes, scales = zip(*pieces, strict=True)
    return np.concatenate(codes), np.concatenate(scales)


def _rows_to_int8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(rows).max(axis=1) / np.float32(LARGEST_INT8)
    return np.rint(_divide(rows, scale[:, None])).astype(np.int8), scale


def _rows_to_fp8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(LARGEST_FP8)
    return _divide(rows, scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scale


def _rows_to_int4(rows: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each group the element furthest from zero becomes -8, or a little less of it if that makes the sum of squared
    errors smaller: a scale may be negative."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % CODES_ALIGNED)))
    groups = padded.reshape(len(rows), -1, group)
    furthest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[..., None], axis=2)
    best_scale, best_error = np.zeros_like(furthest), np.full_like(furthest, np.inf)
    for share in SCALES_TRIED:
        scale = from_bf16(to_bf16(furthest * (share / np.float32(SMALLEST_INT4))))
        error = np.square(_int4_codes(groups, scale) * scale - groups).sum(axis=2, keepdims=True)
        best_scale = np.where(error < best_error, scale, best_scale)
        best_error = np.minimum(error, best_error)
    codes = (_int4_codes(groups, best_scale) - SMALLEST_INT4).astype(np.uint8).reshape(len(rows), -1)
    return pack_int4(codes), to_bf16(best_scale[..., 0])


def _int4_codes(groups: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(_divide(groups, scale)), SMALLEST_INT4, 7)


def _divide(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A row of zeros has the scale zero."""
    return values / np.where(scale == 0, np.float32(1), scale)
