"""The definitions of the ops of vision networks, in numpy; see `engine.ops.reference`."""

from __future__ import annotations

import math

import numpy as np

from engine.dtypes import from_bf16, to_bf16

PIECE = 128  # rows of a segment whose weights are rounded together


def bidirectional_attention(  # noqa: PLR0913 - the inputs of the catalogue, in its order
    qkv: np.ndarray, cos_sin: np.ndarray, segment_ends: np.ndarray, *, num_heads: int, scale: float, is_bf16: int
) -> np.ndarray:
    from engine.ops.reference import rotate

    query, key, value = qkv.reshape(len(qkv), 3, num_heads, -1).swapaxes(0, 1)
    query, key = rotate(query, cos_sin) * np.float32(scale), rotate(key, cos_sin)
    if is_bf16:
        query, key, value = (from_bf16(to_bf16(each)) for each in (query * np.float32(1 / math.log(2)), key, value))
    out = np.empty_like(query)
    for start, end in zip([0, *segment_ends[:-1]], segment_ends, strict=True):
        of_segment = slice(start, end)
        for head in range(num_heads) if start < end else ():
            wide = [array[of_segment, head].astype(np.float64) for array in (query, key, value)]
            out[of_segment, head] = _attend(wide, bool(is_bf16))
    return out.reshape(len(qkv), -1)


def _attend(wide: list[np.ndarray], is_bf16: bool) -> np.ndarray:
    """Return the attention of all rows of a segment and a head, in pieces with the online softmax. `wide` are query,
    key and value."""
    query, key, value = wide
    largest, total, sums = np.full((len(query), 1), -np.inf), np.zeros((len(query), 1)), np.zeros(query.shape)
    for first in range(0, len(key), PIECE):
        scores = query @ key[first : first + PIECE].T
        now = np.maximum(largest, scores.max(axis=1, keepdims=True))
        if is_bf16:
            keep, weights = np.exp2(largest - now), from_bf16(to_bf16(np.exp2(scores - now).astype(np.float32)))
        else:
            keep, weights = np.exp(largest - now), np.exp(scores - now)
        total = total * keep + weights.sum(axis=1, keepdims=True, dtype=np.float64)
        sums = sums * keep + weights @ value[first : first + PIECE]
        largest = now
    return (sums / total).astype(np.float32)


def interpolate_rows(table: np.ndarray, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return (table[rows].astype(np.float64) * weights[:, :, None]).sum(axis=1).astype(np.float32)


def concat_rows(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return x[rows].reshape(len(rows), -1)


def add_gathered_rows(x: np.ndarray, rows: np.ndarray, values: np.ndarray, *, column: int) -> np.ndarray:
    y, is_changed = x.copy(), rows >= 0
    y[is_changed] += values[rows[is_changed], column : column + x.shape[1]]
    return y


def gelu_erf(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return (wide * (1 + np.vectorize(math.erf, otypes=[np.float64])(wide / math.sqrt(2))) / 2).astype(np.float32)
