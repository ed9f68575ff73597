"""Inputs of a vision tower for the patches of one image: positions, windows, and the patches of each token."""

from __future__ import annotations

import numpy as np

from engine.models.layers import POSITIONS
from engine.models.vision import (
    GRID_ROWS,
    GRID_WEIGHTS,
    PATCHES,
    SEGMENT_ENDS,
    TOKEN_ROWS,
    WINDOW_ENDS,
    VisionConfig,
)

Grid = tuple[int, int, int]  # tokens as (frames, rows, columns)


def tower_inputs(config: VisionConfig, patches: np.ndarray, grid: Grid) -> dict[str, np.ndarray]:
    """Return the inputs for the patches [T, values] of an image, which are in the order of its tokens. A tower with
    windows gets them window by window."""
    tokens, inputs = place_inputs(config, grid)
    return {PATCHES: patches.reshape(len(tokens), -1)[tokens].reshape(len(patches), -1), **inputs}


def place_inputs(config: VisionConfig, grid: Grid) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the tokens in the order of the tower, i32 [tokens], and all inputs except the patches."""
    _, rows, columns = grid
    per_token = config.merge_size**2
    tokens, window_ends = _windows(config.window, rows, columns)
    num_patches = rows * columns * per_token
    places = np.empty(len(tokens), np.int32)  # of the tokens, in the order of the tower
    places[tokens] = np.arange(len(tokens))
    positions = np.zeros((3, rows * columns, per_token), np.int32)
    inner = np.indices((config.merge_size, config.merge_size), np.int32).reshape(2, -1)
    positions[1:] = config.merge_size * np.indices((rows, columns), np.int32).reshape(2, -1, 1) + inner[:, None]
    positions = positions[:, tokens].reshape(3, -1)
    inputs = {
        POSITIONS: positions,
        SEGMENT_ENDS: np.full(len(window_ends), num_patches, np.int32),  # of layers that attend to the whole image
        TOKEN_ROWS: places[:, None] * per_token + np.arange(per_token, dtype=np.int32),
    }
    if config.window:
        inputs[WINDOW_ENDS if config.has_full_layers else SEGMENT_ENDS] = window_ends * per_token
    if config.grid_size:
        sizes = rows * config.merge_size, columns * config.merge_size
        inputs |= _grid_inputs(positions[1:], sizes, config)
    return tokens, inputs


def _windows(window: int, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens window by window, i32 [tokens], and the end of each window."""
    tokens = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    if not window:
        return tokens.ravel(), np.array([tokens.size], np.int32)
    parts = [
        tokens[row : row + window, column : column + window].ravel()
        for row in range(0, rows, window)
        for column in range(0, columns, window)
    ]
    return np.concatenate(parts), np.cumsum([len(part) for part in parts], dtype=np.int32)


def _grid_inputs(positions: np.ndarray, sizes: tuple[int, int], config: VisionConfig) -> dict[str, np.ndarray]:
    """Return the four learned positions around each patch, and their weights: the grid of learned positions is
    resampled to that of the patches, bilinearly, with the centers of cells at halves or the corners on one another."""
    taps, weights, grid_size = [], [], config.grid_size
    for position, size in zip(positions.astype(np.float32), sizes, strict=True):
        if config.aligns_corners:
            place = position * np.float32(grid_size - 1) / np.float32(max(size - 1, 1))
        else:
            place = (position + np.float32(0.5)) * np.float32(grid_size) / np.float32(size) - np.float32(0.5)
        before = np.floor(place)
        share = place - before
        taps.append(np.clip(np.stack([before, before + 1], axis=1), 0, grid_size - 1).astype(np.int32))
        weights.append(np.stack([1 - share, share], axis=1))
    rows = taps[0][:, :, None] * grid_size + taps[1][:, None]
    both = weights[0][:, :, None] * weights[1][:, None]
    return {GRID_ROWS: rows.reshape(-1, 4), GRID_WEIGHTS: both.reshape(-1, 4).astype(np.float32)}
