"""Block formats of quantized tensors in GGUF files, decoded with numpy. Independent of files.

A block holds some consecutive elements of a row. Each element is `code * scale - minimum`, with a scale for each group
of the block and, in some formats, a minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Decoded = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # codes [n, size], scales and minima f32 [n, groups]
NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)  # IQ4 codes


@dataclass(frozen=True)
class BlockFormat:
    """A type of tensors: its name, the elements and bytes of a block, and how its bytes u8 [n, num_bytes] are read."""

    name: str
    size: int
    num_bytes: int
    decode: Callable[[np.ndarray], Decoded] | None = None  # None: plain floats
    format: str = ""  # a key of engine.models.formats.FORMATS that stores its codes
    is_exact: bool = False  # whether this format keeps the codes

    @property
    def has_zero(self) -> bool:
        """Return whether the groups of 4-bit codes have minima, which become zero points."""
        return self.name in ("Q4_1", "Q4_K")


def _f16(raw: np.ndarray, start: int) -> np.ndarray:
    """Return the 16-bit floats at byte `start`, f32 [n, 1]."""
    return np.ascontiguousarray(raw[:, start : start + 2]).view(np.float16).astype(np.float32)


def _halves(packed: np.ndarray) -> np.ndarray:
    """Return the lower four bits of all bytes, then the upper ones: u8 [n, 2 * bytes]."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(raw: np.ndarray, start: int) -> np.ndarray:
    """Return the 32 bits from byte `start` on, each as 16 or 0."""
    return np.unpackbits(raw[:, start : start + 4], axis=1, bitorder="little") << 4


def _q4_0(raw: np.ndarray) -> Decoded:
    return _halves(raw[:, 2:]), _f16(raw, 0), None


def _q4_1(raw: np.ndarray) -> Decoded:
    return _halves(raw[:, 4:]), _f16(raw, 0), -_f16(raw, 2)


def _q5_0(raw: np.ndarray) -> Decoded:
    return (_halves(raw[:, 6:]) | _fifth_bits(raw, 2)).view(np.int8) - np.int8(16), _f16(raw, 0), None


def _q5_1(raw: np.ndarray) -> Decoded:
    return (_halves(raw[:, 8:]) | _fifth_bits(raw, 4)).view(np.int8), _f16(raw, 0), -_f16(raw, 2)


def _q8_0(raw: np.ndarray) -> Decoded:
    return raw[:, 2:].view(np.int8), _f16(raw, 0), None


def _scales_of_k(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and minima of the eight groups of a Q4_K or Q5_K block, which have six bits each in bytes 4 to 16.

    Those of the first four groups are whole; those of the others have their two upper bits in the bytes of the first.
    """
    low, middle, high = (raw[:, start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=1)
    minima = np.concatenate([middle & 63, high >> 4 | (middle >> 6) << 4], axis=1)
    return _f16(raw, 0) * scales.astype(np.float32), _f16(raw, 2) * minima.astype(np.float32)


def _two_bits(packed: np.ndarray) -> np.ndarray:
    """Return 256 codes of two bits from u8 [n, 64]: 32 bytes hold 32 codes in their lowest bits, 32 in the next."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (packed.reshape(len(packed), 2, 1, 32) >> shifts & 3).reshape(len(packed), 256)


def _q2_k(raw: np.ndarray) -> Decoded:
    scale, minimum = (_f16(raw, 80 + 2 * i) * (raw[:, :16] >> 4 * i & 15).astype(np.float32) for i in range(2))
    return _two_bits(raw[:, 16:80]).view(np.int8), scale, minimum


def _q3_k(raw: np.ndarray) -> Decoded:
    third = raw[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = (_two_bits(raw[:, 32:96]) | third.reshape(len(raw), 256) << 2).view(np.int8) - np.int8(4)
    upper = raw[:, None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scale = (_halves(raw[:, 96:104]) | upper.reshape(len(raw), 16) << 4).view(np.int8) - np.int8(32)
    return codes, _f16(raw, 108) * scale.astype(np.float32), None


def _iq4_nl(raw: np.ndarray) -> Decoded:
    return NONLINEAR[_halves(raw[:, 2:])], _f16(raw, 0), None


def _iq4_xs(raw: np.ndarray) -> Decoded:
    groups = raw[:, 8:].reshape(-1, 16)
    lower = np.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], axis=2).reshape(len(raw), 8)
    upper = raw[:, 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    scale = (lower | upper.reshape(len(raw), 8) << 4).view(np.int8) - np.int8(32)
    return NONLINEAR[_halves(groups)].reshape(len(raw), 256), _f16(raw, 0) * scale.astype(np.float32), None


def _quarters(raw: np.ndarray, start: int) -> np.ndarray:
    """Return 256 codes of four bits: each 32 bytes hold 32 codes in their lower bits, and the next 32 in the upper."""
    packed = raw[:, start : start + 128].reshape(len(raw), 4, 1, 32)
    return (packed >> np.array([0, 4], np.uint8)[:, None] & 15).reshape(len(raw), 256)


def _q4_k(raw: np.ndarray) -> Decoded:
    return _quarters(raw, 16), *_scales_of_k(raw)


def _q5_k(raw: np.ndarray) -> Decoded:
    fifth = raw[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (_quarters(raw, 48) | fifth.reshape(len(raw), 256) << 4).view(np.int8), *_scales_of_k(raw)


def _q6_k(raw: np.ndarray) -> Decoded:
    low = raw[:, :128].reshape(len(raw), 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    high = raw[:, 128:192].reshape(len(raw), 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = low.reshape(len(raw), 256) | high.reshape(len(raw), 256) << 4
    scale = _f16(raw, 208) * raw[:, 192:208].view(np.int8).astype(np.float32)
    return codes.view(np.int8) - np.int8(32), scale, None


INT4, INT8 = "weight_only_int4_g32", "weight_only_int8"
BLOCK_FORMATS = {  # by the number of the type in the file
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    30: BlockFormat("BF16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18, _q4_0, INT4, is_exact=True),
    3: BlockFormat("Q4_1", 32, 20, _q4_1, INT4, is_exact=True),
    6: BlockFormat("Q5_0", 32, 22, _q5_0, INT8),
    7: BlockFormat("Q5_1", 32, 24, _q5_1, INT8),
    8: BlockFormat("Q8_0", 32, 34, _q8_0, INT8),
    10: BlockFormat("Q2_K", 256, 84, _q2_k, INT8),
    11: BlockFormat("Q3_K", 256, 110, _q3_k, INT8),
    12: BlockFormat("Q4_K", 256, 144, _q4_k, INT4, is_exact=True),
    13: BlockFormat("Q5_K", 256, 176, _q5_k, INT8),
    14: BlockFormat("Q6_K", 256, 210, _q6_k, INT8),
    20: BlockFormat("IQ4_NL", 32, 18, _iq4_nl, INT8),
    23: BlockFormat("IQ4_XS", 256, 136, _iq4_xs, INT8),
}
