"""Quantization of weight matrices, and conversion of matrices that are already quantized, to the codes of 8 or 4 bits
and the scales that `linear_int8`, `linear_fp8` and `linear_int4` read.

It uses numpy on all cores, some rows at a time, so that little memory is needed in addition to the result. Independent
of files and graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from engine.dtypes import CODES_ALIGNED, CODES_PER_SCALE, FP8_BLOCK, MXFP4_GROUP, SMALL_GROUP, from_bf16, to_bf16
from engine.models.config_fields import ModelError

AT_ONCE = 1 << 18  # elements per piece, so that its temporary arrays fit in the CPU's caches
LARGEST_INT8, SMALLEST_INT4, LARGEST_FP8 = 127, -8, 448
LARGEST_FP4_EXPONENT = 2  # of 4 and 6
SCALES_TRIED = np.linspace(0.8, 1.0, 9, dtype=np.float32)  # for int4: clipping outliers may reduce the error


@dataclass(frozen=True)
class Codes:
    """A quantized matrix [N, K] with the values (code - zero) * scale.

    Each row is divided into groups of equal size, with a scale and a zero point per group; `group_of` is the group of
    each column if the groups are not consecutive. Codes of 8 bits are int8, with the zero point 0 if none is given;
    codes of 4 bits are uint8, 0 .. 15, with the zero point 8 if none is given.
    """

    codes: np.ndarray  # int8 or uint8 [N, K]
    scale: np.ndarray  # f32 [N, groups]
    zero: np.ndarray | None = None  # [N, groups]
    group_of: np.ndarray | None = None  # i32 [K]

    def __post_init__(self) -> None:
        if self.group_of is None and self.codes.shape[1] % self.scale.shape[1]:
            raise ValueError(
                f"a row has {self.codes.shape[1]} codes in {self.scale.shape[1]} groups of different sizes"
            )

    @property
    def group_size(self) -> int:
        """Return the number of columns per group, if groups are consecutive."""
        return self.codes.shape[1] // self.scale.shape[1]

    def values(self) -> np.ndarray:
        """Return the values that the codes stand for, f32 [N, K]."""
        zero = np.float32(0 if self.codes.dtype == np.int8 else 8) if self.zero is None else self._each(self.zero)
        return (self.codes.astype(np.float32) - zero) * self._each(self.scale)

    def _each(self, of_groups: np.ndarray) -> np.ndarray:
        """Expand the values of groups to the elements: f32 [N, K] from [N, groups]."""
        if self.group_of is not None:
            return of_groups.astype(np.float32)[:, self.group_of]
        return np.repeat(of_groups.astype(np.float32), self.group_size, axis=1)

    def part(self, rows: slice, columns: slice) -> Codes:
        """Return a part of the matrix. Raises ValueError if it begins inside of a group of 4-bit codes, but is not
        inside of that group, and does not begin at a multiple of 64, or of 32 if the group size is no multiple of 64.
        """
        codes, size = self.codes[rows, columns], self.group_size
        scale, zero = self.scale[rows], None if self.zero is None else self.zero[rows]
        if self.group_of is None and columns.stop <= (columns.start // size + 1) * size:
            one = slice(columns.start // size, columns.start // size + 1)
            return Codes(codes, scale[:, one], None if zero is None else zero[:, one])
        if self.group_of is not None or codes.dtype == np.int8:
            group_of = np.arange(self.codes.shape[1]) // size if self.group_of is None else self.group_of
            return Codes(codes, scale, zero, group_of[columns])
        unit = SMALL_GROUP if size % CODES_PER_SCALE else CODES_PER_SCALE
        if columns.start % unit:
            raise ValueError(f"columns from {columns.start} on do not begin a group of {unit}")
        some = np.arange(columns.start, columns.stop, unit) // size
        return Codes(codes, scale[:, some], None if zero is None else zero[:, some])

    def fits_int4(self, has_zero: bool, group: int) -> bool:
        """Return whether `linear_int4` can compute with these codes, in groups of `group`."""
        one = self.group_of is None and self.scale.shape[1] == 1
        fits = one or (self.group_of is None and self.group_size % group == 0)
        return self.codes.dtype == np.uint8 and fits and (has_zero or self.zero is None or bool((self.zero == 8).all()))

    def as_int4(self, has_zero: bool, group: int = CODES_PER_SCALE) -> tuple[np.ndarray, ...]:
        """Return the parameters of `linear_int4`: packed codes, and per `group` codes a scale and optionally a zero."""
        packed = pack_int4(self.codes)
        num_groups, times = 2 * packed.shape[1] // group, max(self.group_size // group, 1)
        zero = np.full_like(self.scale, 8) if self.zero is None else self.zero.astype(np.float32)
        made = [packed]
        for of_groups in (self.scale, zero)[: 1 + has_zero]:
            one = of_groups.shape[1] == 1
            each = of_groups if one else np.repeat(of_groups, times, axis=1)
            made.append(to_bf16(np.pad(each, ((0, 0), (0, num_groups - each.shape[1])), "edge" if one else "constant")))
        return tuple(made)


def to_int8(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes int8 [N, K] and scales f32 [N]. The largest magnitude of a row becomes 127 or -127."""
    return _by_rows(matrix, _rows_to_int8)


def to_int4(matrix: np.ndarray, group: int = CODES_PER_SCALE) -> tuple[np.ndarray, np.ndarray]:
    """Return codes u8 [N, K' / 2], two per byte, and scales bf16 [N, K' / group], where K' is K padded with zeros."""
    return _by_rows(matrix, partial(_rows_to_int4, group=group))


def to_fp8(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return 8-bit floats (e4m3) as u8 [N, K] and scales f32 [N, 1]. The largest magnitude of a row becomes 448."""
    return _by_rows(matrix, _rows_to_fp8)


def to_block_fp8(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return 8-bit floats (e4m3) as u8 [N, K] and scales f32 [N, blocks], which are equal in all rows of a block.

    A block has 128 x 128 elements, fewer at the edges of the matrix. Its largest magnitude becomes 448.
    """
    return _by_rows(matrix, _blocks_to_fp8, FP8_BLOCK)


def to_mxfp4(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return 4-bit floats (e2m1) u8 [N, K / 2], two per byte, and biased exponents u8 [N, K / 32].

    The largest magnitude of a group becomes 4 or more, and at most 6, as the OCP Microscaling specification has it. A
    matrix of such numbers keeps its values. Raises ModelError if K is not a multiple of 32.
    """
    if matrix.shape[1] % MXFP4_GROUP:
        raise ModelError(f"a matrix has {matrix.shape[1]} columns, mxfp4 needs a multiple of {MXFP4_GROUP}")
    return _by_rows(matrix, _rows_to_mxfp4)


def pack_int4(codes: np.ndarray) -> np.ndarray:
    """Pack codes 0 .. 15 [N, K], two per byte, the first in the lower four bits. Rows are padded with zeros."""
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % CODES_ALIGNED)))
    return codes[:, ::2] | codes[:, 1::2] << 4


def _by_rows(matrix: np.ndarray, quantize: Callable, multiple: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Quantize pieces whose numbers of rows are a multiple of `multiple`, except for the last one."""
    at_once = max(1, AT_ONCE // max(1, matrix.shape[1] * multiple)) * multiple
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


def _rows_to_mxfp4(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = rows.reshape(len(rows), -1, MXFP4_GROUP)
    exponent = np.frexp(np.abs(groups).max(axis=2, keepdims=True))[1] - 1 - LARGEST_FP4_EXPONENT
    biased = np.clip(exponent + 127, 0, 254)
    codes = np.ldexp(groups, 127 - biased).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(len(rows), -1)
    return codes[:, ::2] | codes[:, 1::2] << 4, biased[..., 0].astype(np.uint8)


def _blocks_to_fp8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    (num_rows, width), side = rows.shape, FP8_BLOCK
    padded = np.pad(rows, ((0, -num_rows % side), (0, -width % side)))
    blocks = padded.reshape(len(padded) // side, side, -1, side)
    scale = np.abs(blocks).max(axis=(1, 3), keepdims=True) / np.float32(LARGEST_FP8)
    codes = _divide(blocks, scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(padded.shape)
    return codes[:num_rows, :width], np.repeat(scale[:, 0, :, 0], side, axis=0)[:num_rows]


def _rows_to_int4(rows: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantize rows so that the element of each group that is furthest from zero becomes -8; a scale may be negative.

    Smaller scales, which clip that element, are used if they make the sum of squared errors smaller.
    """
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
    """Divide by the scales, where a scale of zero, which rows of zeros have, counts as one."""
    return values / np.where(scale == 0, np.float32(1), scale)
