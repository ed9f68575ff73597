"""Latent attention in one order of sums, whatever the batch and the chunks, as in `invariant.attention`: units of UNIT
positions, merged in their order. Programs have the same number of rows in every step, so that the units' sums do not
depend on it either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.cuda.attention import LOG2_E
from engine.ops.cuda.invariant.attention import UNIT
from engine.ops.cuda.launch import PDL, cdiv
from engine.ops.cuda.mla import FLOAT32, LatentStep, LatentTile, Launch, write_latents
from engine.ops.cuda.split_kv import merge_units

TILE = LatentTile(32, 64, 8, 2, 1)


def latent_attention(
    *arrays: Tensor, num_heads: int, epsilon: float, scale: float, log_scale: float = 0.0, log_scale_from: int = 1
) -> tuple[Tensor, Tensor]:
    """Compute attention of q_latent [T, H latent] and q [T, H D] over the cache [num_blocks, block_size, latent +
    rope], or of int8 with scales. Return [T, H latent], and the cache, which is updated in place.
    """
    step = LatentStep.of(arrays, num_heads)
    write_latents(step, epsilon)
    (width, padded, *_), out = step.dims, torch.empty_like(step.q_latent)
    launch = Launch.of(step, FLOAT32 if step.q.dtype == torch.float32 else TILE)
    num_units = cdiv(step.where[2].shape[1] * step.kv_cache.shape[1], UNIT)
    splits = launch.splits(num_units) if step.has_one_each else 1
    partial = launch.partial(num_units) if splits > 1 else out
    factors = epsilon, scale * LOG2_E, log_scale
    launch(partial, factors, log_scale_from, splits, num_parts=num_units, unit=UNIT, writes=False)
    if splits > 1:
        grid, lens = (len(out), num_heads), step.where[1]
        merge_units[grid](
            partial, lens, out, out, num_heads, num_units, width, padded, UNIT, 0, False, num_warps=4, **PDL
        )
    return out, step.kv_cache
