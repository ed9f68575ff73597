"""Access to the KV blocks of one rank on the CPU beside its steps."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.executors.block_access import Moves
from engine.executors.nixl_blocks import Region

if TYPE_CHECKING:
    from engine.executors.cpu.executor import CpuExecutor


class CpuBlocks:
    """Access to the blocks of an executor (see `LocalBlocks`)."""

    memory = "DRAM", 0

    def __init__(self, executor: CpuExecutor, caches: Sequence[np.ndarray]):
        self._executor = executor
        self._caches = [cache.reshape(len(cache), -1).view(np.uint8) for cache in caches]
        self._staged: list[np.ndarray] = []

    @property
    def num_steps(self) -> int:
        return self._executor.num_steps

    def read_block(self, block: int) -> bytes:
        return b"".join([cache[block].tobytes() for cache in self._caches])

    def write_block(self, block: int, content: bytes | memoryview) -> None:
        start = 0
        for cache in self._caches:
            cache[block] = np.frombuffer(content, np.uint8, cache.shape[1], start)
            start += cache.shape[1]

    def region(self) -> Region:
        return _region(self._caches)

    def stage(self, num_slots: int) -> Region:
        self._staged = [np.zeros((num_slots, cache.shape[1]), np.uint8) for cache in self._caches]
        return _region(self._staged)

    def digests(self, blocks: Sequence[int]) -> list[bytes]:
        return [self._digest(block) for block in blocks]

    def copy(self, peer: int, moves: Moves) -> list[bytes]:
        for slot, block in moves:
            for source, cache in zip(self._staged, self._caches, strict=True):
                cache[block] = source[slot]
        return self.digests([block for _, block in moves])

    def _digest(self, block: int) -> bytes:
        digest = 0
        for cache in self._caches:
            digest = zlib.crc32(cache[block], digest)
        return digest.to_bytes(4, "little")


def _region(caches: Sequence[np.ndarray]) -> Region:
    [layer_bytes] = {cache.shape[1] for cache in caches}
    return Region([cache.ctypes.data for cache in caches], len(caches[0]), layer_bytes)
