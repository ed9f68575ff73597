"""Copies KV blocks of all layers between two memories that this GPU can access, in one launch, and computes a digest of
the content of each block on the way.

One memory may belong to another GPU or to another process, so memories are addresses. The digest is computed from the
words that were read: if it is the digest that the owner has computed of the block, the copy is what the owner had then,
even if the block was overwritten since.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, next_power_of_2, wait_for_inputs

NUM_PROGRAMS = 64  # of 132 multiprocessors of an H100: enough for NVLink, and steps go on beside them
TILE = 4096  # words of 8 bytes that a program has in flight


def copy_blocks(moves: Tensor, sources: Tensor, targets: Tensor | None, num_words: int) -> Tensor:
    """Copy block `moves[i, 0]` of each layer in `sources` to block `moves[i, 1]` in `targets`. Return the digest of
    each block that was read, i64 [N]. Without `targets`, only compute the digests.

    `moves` is i64 [N, 2]. `sources` and `targets` are i64 [L], the address of the cache of each layer, whose blocks
    have `num_words` words of 8 bytes."""
    num_layers, tile = len(sources), min(TILE, next_power_of_2(num_words))
    num_tiles = cdiv(num_words, tile)
    sums = torch.empty(len(moves), num_layers * num_tiles, dtype=torch.int64, device=moves.device)
    _copy_blocks[(min(sums.numel(), NUM_PROGRAMS),)](
        moves, sources, targets, sums, sums.numel(), num_words, num_layers, num_tiles, targets is not None, tile,
        num_warps=8, **PDL,
    )  # fmt: skip
    return sums.sum(1)


@triton.jit
def _cache(address):
    """Return the pointer that is stored at an address. Caches are aligned to 16 bytes."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.int64)), 16)


@kernel
def _copy_blocks(
    numbers, sources, targets, sums, count, num_words, NUM_LAYERS: tl.constexpr, NUM_TILES: tl.constexpr,
    COPIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy `count` tiles. Every word is mixed with its position, so the sum depends on the order of the words."""
    begin_next()
    wait_for_inputs()
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        move, part = index // (NUM_LAYERS * NUM_TILES), index % (NUM_LAYERS * NUM_TILES)
        layer = part // NUM_TILES
        at = part % NUM_TILES * TILE + tl.arange(0, TILE)
        is_in = at < num_words
        source = _cache(sources + layer)
        words = tl.load(source + tl.load(numbers + 2 * move) * num_words + at, mask=is_in, other=0)
        if COPIES:
            target = _cache(targets + layer)
            tl.store(target + tl.load(numbers + 2 * move + 1) * num_words + at, words, mask=is_in)
        position = (layer.to(tl.int64) * num_words + at + 1) * 0x1E3779B97F4A7C15
        mixed = (words + position) * 0x3F58476D1CE4E5B9
        mixed = (mixed ^ (mixed >> 31)) * 0x14D049BB133111EB
        mixed = mixed ^ (mixed >> 29)
        tl.store(sums + index, tl.sum(tl.where(is_in, mixed, 0), 0))
