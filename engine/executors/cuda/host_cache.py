"""KV blocks swapped out to pinned memory of the host (SWAP_SPACE). Independent of block hashes and requests.

Blocks pass through a staging buffer on the device, where a block with all its layers is contiguous, so that each is one
copy over the bus, made in parallel with steps. A block that leaves is copied to the stage before a step overwrites it;
a block that returns is fetched while the step before still computes. The host waits for neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.core.types import Copy, Swaps
from engine.errors import ConfigError
from engine.executors.cuda.cache import Caches
from engine.executors.cuda.host_transfers import Uploads
from engine.settings.config import Config

STAGE_BYTES = 1 << 28  # in each direction; with more in one step, the device waits for the bus
CHUNK_BYTES = 1 << 30  # torch rounds pinned allocations up to a power of two
Moves = Sequence[tuple[int, int]]  # block id, place on the host


class HostCache:
    """Host memory for swapped blocks. Owns the pinned memory, the staging buffers and a stream for each direction.

    Raises ConfigError when SWAP_SPACE has no room for one block.
    """

    def __init__(self, caches: Caches, config: Config, device: torch.device):
        size, num_places = caches.block_bytes, config.num_host_blocks(caches.block_bytes)
        if not num_places:
            needed = size * config.mp_num / 2**30
            raise ConfigError(f"SWAP_SPACE is {config.swap_space:g} GiB, one block needs {needed:.2g}")
        words, is_gpu = size // 8, device.type == "cuda"  # of 8 bytes, as in `Caches.words`
        self._caches = caches
        self._module = torch.get_device_module(device)  # on the CPU its streams do nothing
        self._down, self._up = self._module.Stream(), self._module.Stream()
        self._uploads = Uploads(device)
        self._num_staged = max(1, min(num_places, STAGE_BYTES // size))
        stages = torch.empty(2, self._num_staged, words, dtype=torch.int64, device=device)
        self._stage_out, self._stage_in = stages
        self._chunk_len = max(1, CHUNK_BYTES // size)
        lengths = [min(self._chunk_len, num_places - start) for start in range(0, num_places, self._chunk_len)]
        self._chunks = [torch.empty(length, words, dtype=torch.int64, pin_memory=is_gpu) for length in lengths]

    def move(self, swaps: Swaps, copies: Sequence[Copy]) -> None:
        """Move the blocks of a step before it runs: swap blocks out, copy blocks on the device, then swap blocks in."""
        self._up.wait_stream(self._down)  # before the swaps out, which wait for the last step to end
        blocks = {name: np.array([block for block, _ in moves], np.int64) for name, moves in swaps._asdict().items()}
        sent = self._uploads.send(blocks)
        self._swap_out(swaps.outs, sent["outs"])
        self._caches.copy(copies)
        if {place for _, place in swaps.outs} & {place for _, place in swaps.ins}:
            self._up.wait_stream(self._down)
        self._swap_in(swaps.ins, sent["ins"])

    def _swap_out(self, moves: Moves, blocks: Tensor) -> None:
        stage, main = self._stage_out, self._module.current_stream()
        for some, ids in self._staged(moves, blocks):
            main.wait_stream(self._down)  # the stream has read the stage
            for layer, part in self._parts(stage[: len(some)]):
                torch.index_select(layer, 0, ids, out=part)
            self._down.wait_stream(main)
            with self._module.stream(self._down):
                for row, (_, place) in zip(stage, some, strict=False):
                    self._at(place).copy_(row, non_blocking=True)

    def _swap_in(self, moves: Moves, blocks: Tensor) -> None:
        stage, main = self._stage_in, self._module.current_stream()
        for some, ids in self._staged(moves, blocks):
            with self._module.stream(self._up):
                for row, (_, place) in zip(stage, some, strict=False):
                    row.copy_(self._at(place), non_blocking=True)
            main.wait_stream(self._up)
            for layer, part in self._parts(stage[: len(some)]):
                layer.index_copy_(0, ids, part)
            self._up.wait_stream(main)  # the stream has read the stage

    def _staged(self, moves: Moves, blocks: Tensor) -> Iterator[tuple[Moves, Tensor]]:
        """Split the moves into parts that fit on the stage. Yield each part with its block ids on the device."""
        for start in range(0, len(moves), self._num_staged):
            end = start + self._num_staged
            yield moves[start:end], blocks[start:end]

    def _parts(self, stage: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Return pairs of each layer's blocks and the layer's columns of the staged blocks."""
        layers = self._caches.words
        return zip(layers, stage.split([layer.shape[1] for layer in layers], dim=1), strict=True)

    def _at(self, place: int) -> Tensor:
        return self._chunks[place // self._chunk_len][place % self._chunk_len]
