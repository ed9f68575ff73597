"""Counts of chosen experts on the device, which kernels add to and the host reads without waiting for steps."""

from __future__ import annotations

import threading

import numpy as np
import torch


class DeviceCounter:
    """See `engine.executors.expert_usage.Counter`. `counts` is i64 [layers, experts]."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device):
        is_gpu = device.type == "cuda"
        self.counts = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self._host = torch.zeros(num_layers, num_experts, dtype=torch.int64, pin_memory=is_gpu)
        self._stream = torch.cuda.Stream(device) if is_gpu else None
        self._copied = torch.cuda.Event() if is_gpu else None
        self._last = self._host.numpy().copy()
        self._lock = threading.Lock()

    def read(self, is_final: bool = False) -> np.ndarray:
        """Return what the last call has begun to copy, and begin the next copy."""
        if self._copied is None:
            return self.counts.numpy().copy()
        with self._lock:
            if is_final:
                torch.cuda.synchronize(self.counts.device)
                return self.counts.cpu().numpy()
            if self._copied.query():  # True before the first copy
                self._last = self._host.numpy().copy()
                with torch.cuda.stream(self._stream):
                    self._host.copy_(self.counts, non_blocking=True)
                    self._copied.record()
            return self._last

    def clear(self) -> None:
        self.counts.zero_()
