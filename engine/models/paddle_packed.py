"""Quantized matrices in the layout of Paddle's `weight_quantize` for GPUs, as exports of PaddleNLP and checkpoints of
FastDeploy have them. Independent of both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.models.config_fields import ModelError

# Bits -> place of each element of a row among 16 or 32 neighbors. The kernels unpack several elements at a time.
PLACES = {
    8: np.array([2 * r if r < 8 else 2 * (r - 8) + 1 for r in range(16)]),
    4: np.array([r % 8 // 2 * 8 + r % 2 * 4 + r // 8 for r in range(32)]),
}
TILE = 64  # consecutive elements of one row, when 2 or 4 rows are interleaved


@dataclass(frozen=True, eq=False)
class PaddlePacked:
    """View of a quantized matrix [N, K] that is stored in the layout of CUDA kernels."""

    stored: np.ndarray  # its bytes, u8 [N * K * bits / 8]
    bits: int
    shape: tuple[int, int]

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of the elements: int8 for 8 bits, uint8 for 4 bits, where the code 8 stands for zero."""
        return np.dtype(np.int8 if self.bits == 8 else np.uint8)

    @property
    def interleaved(self) -> int:
        """Return the number of rows that are interleaved."""
        return 16 // self.bits

    def rows(self, start: int, stop: int) -> PaddlePacked:
        """Return rows `start` to `stop`, in the same layout. Raises ModelError if that cuts interleaved rows."""
        if start % self.interleaved or stop % self.interleaved:
            raise ModelError(f"rows {start} to {stop} cut those that are interleaved, {self.interleaved} at a time")
        row_bytes = self.shape[1] * self.bits // 8
        return replace(
            self, stored=self.stored[start * row_bytes : stop * row_bytes], shape=(stop - start, self.shape[1])
        )

    def __getitem__(self, key: tuple[slice, slice]) -> np.ndarray:
        start, stop = key[0].start, key[0].stop
        first = start - start % self.interleaved
        some = self.rows(first, min(stop + -stop % self.interleaved, self.shape[0]))
        return some._plain()[start - first : stop - first, key[1]]

    def _plain(self) -> np.ndarray:
        numbers = self.stored ^ 0x80 if self.bits == 8 else np.stack([self.stored & 15, self.stored >> 4], axis=1)
        tiles = numbers.reshape(-1, self.shape[1] // TILE, self.interleaved, TILE).swapaxes(1, 2)
        places = PLACES[self.bits]
        mixed = tiles.reshape(self.shape[0], self.shape[1] // len(places), len(places))
        return mixed[..., places].reshape(self.shape).view(self.dtype)


def packed(array: np.ndarray, scale: np.ndarray, columns: int) -> PaddlePacked:
    """Return the bytes of `array` as a matrix with a row of so many columns for each scale."""
    rows, bits = len(scale), array.size * 8 // max(1, len(scale) * columns)
    fits = scale.ndim == 1 and bits in PLACES and rows * columns * bits == array.size * 8
    if not fits or columns % TILE or rows % (16 // bits):
        raise ModelError(f"{array.shape} of bytes and {scale.shape} of scales are no matrix of 8 or 4 bits by channel")
    return PaddlePacked(np.ascontiguousarray(array).view(np.uint8).reshape(-1), bits, (rows, columns))
