"""Access to the KV blocks of one GPU beside its steps: over the host's memory, and from the memory of the GPUs of other
processes on this host."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.executors.block_access import STAGED, Moves, SharedCaches
from engine.executors.cuda import compilation, ipc
from engine.executors.cuda.cache import Caches
from engine.executors.cuda.host_transfers import Download, Uploads
from engine.executors.nixl_blocks import Region
from engine.ops.cuda.block_copy import copy_blocks

log = logging.getLogger(__name__)


class _Opened(NamedTuple):
    """Caches of another process that are open here."""

    bases: Sequence[int]  # addresses of the allocations
    layers: Tensor  # i64: address of each layer's cache
    num_blocks: int


class CudaBlocks:
    """Access to the blocks of one rank (see `DeviceBlocks` and `LocalBlocks`), for one thread. Owns a stream, in
    which it works beside the steps. It waits for its own work only, so the caller must know that steps have written
    what it reads.

    Steps are not counted: when the first rank has ended a step, all ranks have written their keys and values, because
    the sum of the last layer follows them.
    """

    num_steps = 0

    def __init__(self, caches: Caches, device: torch.device):
        [self._num_words] = {layer.shape[1] for layer in caches.words}
        self._caches, self._device = caches, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._uploads = Uploads(device)
        self._layers = torch.tensor([layer.data_ptr() for layer in caches.words], device=device)
        self._opened: dict[int, _Opened] = {}
        padding = [(caches.null_block, caches.null_block)]
        with compilation.expected():
            for targets in (None, self._layers):
                self._run(padding, self._layers, targets)

    def read_block(self, block: int) -> bytes:
        with torch.cuda.stream(self._stream):
            content = torch.cat([layer[block] for layer in self._caches.words])
            return Download.of({"content": content}, self._device).wait()["content"].tobytes()

    def write_block(self, block: int, content: bytes | memoryview) -> None:
        with torch.cuda.stream(self._stream):
            sent = self._uploads.send({"content": np.frombuffer(content, np.int64)})["content"]
            for layer, part in zip(self._caches.words, sent.split(self._num_words), strict=True):
                layer[block].copy_(part)
            Download({}, self._device).wait()

    def share(self) -> list[SharedCaches]:
        return [(self._caches.null_block, [ipc.export_memory(layer) for layer in self._caches.words])]

    @property
    def memory(self) -> tuple[str, int]:
        return ("VRAM" if self._stream else "DRAM"), self._index

    def region(self) -> Region:
        return Region(self._layers.tolist(), self._caches.null_block, 8 * self._num_words)

    def stage(self, num_slots: int) -> Region:
        shape = len(self._layers), num_slots, self._num_words
        with torch.cuda.stream(self._stream):
            self._staged = torch.empty(shape, dtype=torch.int64, device=self._device)
            layers = torch.tensor([layer.data_ptr() for layer in self._staged], device=self._device)
        self._opened[STAGED] = _Opened((), layers, num_slots)
        return Region(layers.tolist(), num_slots, 8 * self._num_words)

    def digests(self, blocks: Sequence[int]) -> list[bytes]:
        return self._run([(block, block) for block in blocks], self._layers, None)

    def open(self, peer: int, shared: Sequence[SharedCaches]) -> None:
        [(num_blocks, layers)] = shared
        if len(layers) != len(self._layers):
            raise ValueError(f"{len(layers)} caches were shared, this model has {len(self._layers)}")
        base_of: dict[bytes, int] = {}
        try:
            for handle in dict.fromkeys(handle for handle, _ in layers):
                base_of[handle] = ipc.open_memory(handle, self._index)
        except ipc.IpcError:
            self._close(list(base_of.values()))
            raise
        addresses = [base_of[handle] + offset for handle, offset in layers]
        with torch.cuda.stream(self._stream):
            on_device = torch.tensor(addresses, device=self._device)
        self._opened[peer] = _Opened(list(base_of.values()), on_device, num_blocks)

    def close(self, peer: int) -> None:
        if opened := self._opened.pop(peer, None):
            self._close(opened.bases)

    def copy(self, peer: int, moves: Moves) -> list[bytes]:
        opened = self._opened[peer]
        if not all(0 <= source < opened.num_blocks for source, _ in moves):
            raise ValueError(f"a block is not one of the {opened.num_blocks} of the prefill instance")
        return self._run(moves, opened.layers, self._layers)

    @property
    def _index(self) -> int:
        return self._device.index or 0

    def _close(self, bases: Sequence[int]) -> None:
        for base in bases:
            try:
                ipc.close_memory(base, self._index)
            except ipc.IpcError as error:
                log.warning("memory of another process stays open: %s", error)

    def _run(self, moves: Moves, sources: Tensor, targets: Tensor | None) -> list[bytes]:
        """Copy blocks and return their digests, when that has ended."""
        with torch.cuda.stream(self._stream):
            sent = self._uploads.send({"moves": np.array(moves, np.int64)})["moves"]
            digests = copy_blocks(sent, sources, targets, self._num_words)
            return [each.tobytes() for each in Download.of({"digests": digests}, self._device).wait()["digests"]]
