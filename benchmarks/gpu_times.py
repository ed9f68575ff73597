"""Time of kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

RUNS = 5


def microseconds(run: Callable[[], object]) -> float:
    """Return the shortest of several times of `run`, which is captured in a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        run()
    for _ in range(RUNS + 1):  # the first is not counted
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return min(times[1:])
