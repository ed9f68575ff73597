"""KV caches of all layers on the device, with one additional block that padding writes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.core.types import Copy
from engine.errors import ConfigError
from engine.models.kv_cache import BLOCK, CacheSpec

MIN_BLOCK_SIZE = 16  # positions; the kernels read a power of two at a time


class Caches:
    """KV caches of all layers on one device. Owns their tensors.

    Raises ConfigError for a block size that the kernels do not support.
    """

    def __init__(self, specs: Sequence[CacheSpec], device: torch.device):
        for spec in specs:
            assert spec.axes[0] == BLOCK, "the kernels expect a block in one piece"
            if spec.block_size < MIN_BLOCK_SIZE or spec.block_size & (spec.block_size - 1):
                raise ConfigError(
                    f"BLOCK_SIZE was {spec.block_size} at export, on a GPU it must be a power of two,"
                    f" {MIN_BLOCK_SIZE} at least"
                )
        self._specs, self._device = specs, device
        self._num_blocks = 0
        self.tensors: Mapping[str, Tensor] = {}
        self.words: Sequence[Tensor] = ()  # for each layer, the same memory as i64 [num_blocks + 1, words]
        self.block_bytes = sum(spec.block_bytes for spec in specs)

    @property
    def num_bytes(self) -> int:
        return (self._num_blocks + 1) * self.block_bytes if self.tensors else 0

    @property
    def null_block(self) -> int:
        """Return the id of the block that padding rows write to."""
        return self._num_blocks

    def allocate(self, num_blocks: int) -> None:
        """Allocate the caches with `num_blocks` blocks and the null block. Their content is undefined."""
        self._num_blocks = num_blocks
        self.tensors = {
            spec.name: torch.empty(spec.shape_of(num_blocks + 1), dtype=getattr(torch, spec.dtype), device=self._device)
            for spec in self._specs
        }
        self.words = [tensor.flatten(1).view(torch.int64) for tensor in self.tensors.values()]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy blocks on the device, in order."""
        for copy in copies:
            for layer in self.words:
                layer[copy.target] = layer[copy.source]

    def clear(self) -> None:
        self.tensors, self.words = {}, ()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
