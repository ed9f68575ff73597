"""Experts of one rank in pinned memory of the host (EXPERTS_ON_HOST): which ones, and their loading.

At first each layer has the same share of its experts on the host. While requests decode, experts that are used often
take the places of others of their layer. Neither changes an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.executors.cuda import weights
from engine.executors.cuda.host_cache import CHUNK_BYTES
from engine.graph import Graph
from engine.graph.experts import expert_sizes, expert_stacks
from engine.ops.cuda.offloaded_experts import OffloadedMatrix, Stage

log = logging.getLogger(__name__)

ALIGNED = 256  # bytes
INTERVAL = 64  # launched steps after which experts may change places
MIN_RATIO = 2  # of the choices of an expert that moves to the device and of the one that makes room
SWAPPED_BYTES = 1 << 31  # of the experts that change places at once; requests wait meanwhile
Load = Callable[[Graph], dict[str, Tensor]]


class HostExperts:
    """Experts on the host, at most `num_bytes` of them. Owns their memory and the stage. `observe` has to be called
    before the first step."""

    def __init__(self, num_bytes: int, device: torch.device):
        self._num_bytes, self._device, self._num_steps = num_bytes, device, 0
        self._usage = self._counted = np.zeros((1, 1), np.int64)  # recent choices, and `counts` when they were read

    def load(self, graph: Graph, load: Load) -> dict[str, Any]:
        """Return the parameters of the graph, see `engine.executors.cuda.program.Params`. `load` loads those of a part
        of it to the device. Raises ConfigError if the host's part is less than an expert."""
        stacks, sizes = expert_stacks(graph), expert_sizes(graph)
        counts, memory = sizes.numbers_on_host(self._num_bytes), _PinnedMemory(self._num_bytes, self._device)
        params: dict[str, Any] = load(weights.without(graph, {name for stack in stacks for name in stack}))
        self.matrices: list[OffloadedMatrix] = []
        for index, stack in enumerate(stacks):  # one at a time, because all together may not fit on the device
            params |= load(weights.without(graph, graph.parameters.keys() - stack))
            if count := counts[index // 2]:
                parts = params[stack[0]].chunk(sizes.num_experts)
                kept = len(parts) - count
                on_device = torch.cat([parts[0][:0], *parts[:kept]])
                on_host = [memory.keep(part) for part in parts[kept:]]
                params[stack[0]] = matrix = OffloadedMatrix(on_device, on_host, range(len(parts)))
                self.matrices.append(matrix)
        self._stage = Stage(self.matrices, self._device)
        self._layers = [index for index, count in enumerate(counts) if count]
        num_bytes, total = sum(matrix.host_bytes for matrix in self.matrices), sizes.num_layers * sizes.num_experts
        log.info("%d experts of %d, %.1f GB, are in the host's memory", sum(counts), total, num_bytes / 1e9)
        return params

    def observe(self, counts: Tensor) -> None:
        """Choose the experts on the host by `counts`, i64 [layers, experts] on the device: how often each expert was
        chosen. Steps update them."""
        self._counts = counts

    def close(self) -> None:
        """Release the memory."""
        self.matrices.clear()  # also of the stage, which they refer to

    def begin_step(self) -> None:
        """Let experts change places if it is time to. It is called before a step is launched."""
        self._num_steps += 1
        if self._num_steps % INTERVAL == 0:
            counts = self._counts.cpu().numpy().copy()  # a copy also where the CPU is the device
            self._usage = self._usage // 2 + np.maximum(counts - self._counted, 0)
            self._counted = counts
            self._swap(self._usage[self._layers].tolist())

    def _swap(self, usage: list[list[int]]) -> None:
        """Exchange the expert that is used most on the host for the one that is used least on the device, if the ratio
        is too large to be chance, in the layers where it helps most."""
        found = []
        for index, used in enumerate(usage):
            matrix = self.matrices[2 * index]
            num_here, of_place = len(matrix.on_device), [used[expert] for expert in matrix.experts]
            if num_here:
                least, most = min(of_place[:num_here]), max(of_place[num_here:])
                places = of_place.index(least), of_place.index(most, num_here) - num_here
                found += [(most - least, index, places)] * (most > MIN_RATIO * least)
        num_bytes = 0
        for _, index, (place, host_place) in sorted(found, reverse=True):
            for each in (2 * index, 2 * index + 1):
                num_bytes += 2 * self.matrices[each].expert_bytes
                self._stage.swap(each, place, host_place)
            if num_bytes >= SWAPPED_BYTES:
                return


class _PinnedMemory:
    """Pinned memory for about `num_bytes`, in chunks, because torch rounds allocations up to a power of two."""

    def __init__(self, num_bytes: int, device: torch.device):
        self._left, self._is_gpu = num_bytes, device.type == "cuda"
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor in this memory."""
        size = -(-tensor.nbytes // ALIGNED) * ALIGNED
        if size > len(self._chunk):
            length = max(size, min(CHUNK_BYTES, self._left))
            self._chunk = torch.empty(length, dtype=torch.uint8, pin_memory=self._is_gpu)
        part, self._chunk = self._chunk[: tensor.nbytes], self._chunk[size:]
        self._left -= size
        copy = part.view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor)
        return copy
