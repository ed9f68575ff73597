"""Blocks for which the KV cache has no room, in pinned memory of the host (SWAP_SPACE). Knows no keys and no requests.

Between the two lies a stage on the device, where a block is in one piece, with all its layers: so each is one copy over
the bus, made beside the steps. What leaves is put on the stage before a step overwrites it; what comes back is fetched
while the step before still computes. The host waits for neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.core.types import Copy, Swaps
from engine.errors import ConfigError
from engine.executors.cuda.cache import Caches
from engine.executors.cuda.transfer import Uploads
from engine.settings.config import Config

STAGE_BYTES = 1 << 28  # in each direction; for more in one step the device waits for the bus
CHUNK_BYTES = 1 << 30  # torch rounds what it pins up to a power of two
Moves = Sequence[tuple[int, int]]  # block, place on the host


class HostCache:
    def __init__(self, caches: Caches, config: Config, device: torch.device):
        size, num_places = caches.block_bytes, config.num_host_blocks(caches.block_bytes)
        if not num_places:
            needed = size * config.mp_num / 2**30
            raise ConfigError(f"SWAP_SPACE is {config.swap_space:g} GiB, one block needs {needed:.2g}")
        words, is_gpu = size // 8, device.type == "cuda"  # as `Caches.words`
        self._caches = caches
        self._module = torch.get_device_module(device)  # whose streams are nothing on the CPU
        self._down, self._up = self._module.Stream(), self._module.Stream()
        self._uploads = Uploads(device)
        self._num_staged = max(1, min(num_places, STAGE_BYTES // size))
        stages = torch.empty(2, self._num_staged, words, dtype=torch.int64, device=device)
        self._stage_out, self._stage_back = stages
        self._chunk_len = max(1, CHUNK_BYTES // size)
        lengths = [min(self._chunk_len, num_places - start) for start in range(0, num_places, self._chunk_len)]
        self._chunks = [torch.empty(length, words, dtype=torch.int64, pin_memory=is_gpu) for length in lengths]

    def move(self, swaps: Swaps, copies: Sequence[Copy]) -> None:
        """What a step begins with: blocks go out, some are copied, others come back."""
        self._up.wait_stream(self._down)  # only for earlier steps: what this one puts out waits for the last one to end
        blocks = {name: np.array([block for block, _ in moves], np.int64) for name, moves in swaps._asdict().items()}
        sent = self._uploads.send(blocks)
        self._put_out(swaps.out, sent["out"])
        self._caches.copy(copies)
        if {place for _, place in swaps.out} & {place for _, place in swaps.back}:
            self._up.wait_stream(self._down)
        self._bring_back(swaps.back, sent["back"])

    def _put_out(self, moves: Moves, blocks: Tensor) -> None:
        stage, main = self._stage_out, self._module.current_stream()
        for some, ids in self._staged(moves, blocks):
            main.wait_stream(self._down)  # it has read what was on the stage
            for layer, part in self._parts(stage[: len(some)]):
                torch.index_select(layer, 0, ids, out=part)
            self._down.wait_stream(main)
            with self._module.stream(self._down):
                for row, (_, place) in zip(stage, some, strict=False):
                    self._at(place).copy_(row, non_blocking=True)

    def _bring_back(self, moves: Moves, blocks: Tensor) -> None:
        stage, main = self._stage_back, self._module.current_stream()
        for some, ids in self._staged(moves, blocks):
            with self._module.stream(self._up):
                for row, (_, place) in zip(stage, some, strict=False):
                    row.copy_(self._at(place), non_blocking=True)
            main.wait_stream(self._up)
            for layer, part in self._parts(stage[: len(some)]):
                layer.index_copy_(0, ids, part)
            self._up.wait_stream(main)  # it has read what was on the stage

    def _staged(self, moves: Moves, blocks: Tensor) -> Iterator[tuple[Moves, Tensor]]:
        """As many as find room on the stage together."""
        for start in range(0, len(moves), self._num_staged):
            end = start + self._num_staged
            yield moves[start:end], blocks[start:end]

    def _parts(self, stage: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each layer's blocks, and its part of those on the stage."""
        layers = self._caches.words
        return zip(layers, stage.split([layer.shape[1] for layer in layers], dim=1), strict=True)

    def _at(self, place: int) -> Tensor:
        return self._chunks[place // self._chunk_len][place % self._chunk_len]
