"""Error of latent attention by the way its cached rows are stored: `python -m benchmarks.latent_groups`.

Rows are random, with weights of the norm of different magnitudes. A line has the bytes of a row, the standard deviation
of the scores' error where that of the scores is 2.5, and the relative error of the weighted sums.
"""

from __future__ import annotations

import numpy as np

from engine.dtypes import from_bf16, to_bf16
from engine.ops.reference import from_latent_int8, to_latent_int8

LATENT, ROPE, HEADS, POSITIONS = 512, 64, 16, 2048
SCORES = 2.5  # standard deviation


def in_groups(rows: np.ndarray, size: int) -> np.ndarray:
    """Return the rows after they were rounded to 8 bits with a scale for each `size` elements."""
    width = rows.shape[1]
    groups = [slice(start, min(start + size, width)) for start in range(0, width, size)]
    return from_latent_int8(*to_latent_int8(rows, groups), groups).astype(np.float32)


def attend(query: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scores = query @ rows.T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores, weights / weights.sum(axis=1, keepdims=True) @ rows[:, :LATENT]


def main() -> None:
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((POSITIONS, LATENT), np.float32)
    latents *= np.exp(rng.standard_normal(LATENT, np.float32) / 2)
    rotated = rng.standard_normal((POSITIONS, ROPE), np.float32) * np.exp(rng.standard_normal(ROPE, np.float32) / 2)
    rows = np.concatenate([latents, rotated], axis=1)
    query = rng.standard_normal((HEADS, LATENT + ROPE), np.float32)
    query *= SCORES / (query @ rows.T).std()
    scores, sums = attend(query, rows)
    wide = from_bf16(to_bf16(rows))
    cases = {"bfloat16": (wide, 2 * rows.shape[1])}
    cases["8 bits, one scale"] = in_groups(rows, rows.shape[1]), rows.shape[1] + 2
    for size in (128, 64, 32):
        stored = np.concatenate([in_groups(latents, size), in_groups(rotated, size)], axis=1)
        cases[f"8 bits, groups of {size}"] = stored, rows.shape[1] + 2 * (-(-LATENT // size) + -(-ROPE // size))
    mixed = np.concatenate([in_groups(latents, 64), wide[:, LATENT:]], axis=1)
    cases["8 bits, groups of 64, rotated elements in bfloat16"] = mixed, LATENT + 2 * LATENT // 64 + 2 * ROPE
    for name, (stored, num_bytes) in cases.items():
        found = attend(query, stored)
        error = np.linalg.norm(found[1] - sums) / np.linalg.norm(sums)
        print(f"| {name} | {num_bytes:,} | {(found[0] - scores).std():.4f} | {error:.2%} |")


if __name__ == "__main__":
    main()
