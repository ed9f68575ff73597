"""Transfers between host and device: all inputs of a step in one copy, and its results in others. Independent of the
model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np
import torch
from torch import Tensor

# Unsigned integers arrive as signed ones with the same bits. Larger types come first, for their alignment.
DTYPES = {
    torch.int64: ("int64", "uint64"),
    torch.float32: ("float32",),
    torch.int32: ("int32", "uint32"),
    torch.uint8: ("uint8",),
}
IN_FLIGHT = 2  # maximum number of launched steps that are not known to have ended


class Uploads:
    """Uploads to one device. Packs arrays into one of `IN_FLIGHT` pinned buffers, which take turns, and copies that
    buffer."""

    def __init__(self, device: torch.device):
        self._device = device
        self._hosts = [self._host(0) for _ in range(IN_FLIGHT)]
        self._turn = 0

    def send(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Copy the arrays to the device and return the tensors by name. The caller may change the arrays afterwards."""
        dtypes = {name: array.dtype.name for name, array in arrays.items()}
        groups = [[name for name, dtype in dtypes.items() if dtype in those] for those in DTYPES.values()]
        parts = [np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8) for name in chain(*groups)]
        size = sum([part.nbytes for part in parts])
        self._turn = (self._turn + 1) % IN_FLIGHT
        if len(self._hosts[self._turn]) < size:
            self._hosts[self._turn] = self._host(2 * size)
        host = self._hosts[self._turn][:size]
        np.concatenate(parts, out=host.numpy())
        rest = host.to(self._device, non_blocking=True, copy=True)
        sent: dict[str, Tensor] = {}
        for dtype, names in zip(DTYPES, groups, strict=True):
            sizes = [arrays[name].size for name in names]
            end = sum(sizes) * dtype.itemsize
            for name, tensor in zip(names, rest[:end].view(dtype).split(sizes), strict=True):
                sent[name] = tensor if arrays[name].ndim == 1 else tensor.view(arrays[name].shape)
            rest = rest[end:]
        return sent

    def _host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")


class Download:
    """Pinned tensors that the work launched so far writes. `wait` waits for all of that work, even without any
    tensors."""

    def __init__(self, hosts: Mapping[str, Tensor], device: torch.device):
        self._hosts = hosts
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        if self._done:
            self._done.record()

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], device: torch.device) -> Download:
        """Start to copy the tensors to the host."""
        is_gpu = device.type == "cuda"
        hosts = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_gpu).copy_(tensor, non_blocking=True)
            for name, tensor in tensors.items()
        }
        return cls(hosts, device)

    def wait(self) -> dict[str, np.ndarray]:
        """Wait for the work and return the arrays by name."""
        if self._done:
            self._done.synchronize()
        return {name: host.numpy() for name, host in self._hosts.items()}
