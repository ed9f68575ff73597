"""Capture of CUDA graphs, which all graphs of an executor and of its draft model share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from engine.executors.cuda.compilation import KernelCompiler

Result = TypeVar("Result")


class GraphCapture:
    """Captures what functions launch as CUDA graphs that share a memory pool. In a dry run each function is only
    called."""

    def __init__(self, device: torch.device, *, is_dry_run: bool = False):
        self._device = device
        self._pool = None if is_dry_run else torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Return the graph of what `run` launches, and its result, which a replay overwrites."""
        result, graph = run(), torch.cuda.CUDAGraph()  # the first call lets libraries initialize
        torch.cuda.synchronize(self._device)
        if self._pool is None:
            return graph, result
        with torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):  # NCCL has its own thread
            return graph, run()


def capture_graphs(
    record: Callable[[GraphCapture], Result], device: torch.device, compiler: KernelCompiler | None
) -> Result:
    """Return what `record` captures. `compiler` compiles the kernels that it launches first, in parallel."""
    if compiler:
        compiler.compile_missing(lambda: record(GraphCapture(device, is_dry_run=True)))
    return record(GraphCapture(device))
