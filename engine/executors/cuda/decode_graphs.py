"""CUDA graphs of decode steps: one for each batch size of CUDAGRAPH_CAPTURE_SIZES, the next larger one takes a batch.

A graph is what a step launches, recorded once: replaying it costs the host microseconds, not a call for each op. Rows
that only fill up a batch write into nobody's block; what they compute is not looked at.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.settings.config import Config

log = logging.getLogger(__name__)

Run = Callable[[Mapping[str, Tensor]], Tensor]


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]  # that it reads, of this size
    logits: Tensor


class DecodeGraphs:
    """`max_blocks`: of the longest request, in a block table."""

    def __init__(self, config: Config, max_blocks: int, device: torch.device):
        is_used = config.use_cudagraph and device.type == "cuda"
        self._sizes = capture_sizes(config.cudagraph_capture_sizes, config.batch_size) if is_used else []
        self._device = device
        self._captured: dict[int, Captured] = {}
        self._nobodys_block = 0
        if is_used:
            size = self._sizes[-1]
            self._tables = torch.zeros(size, max_blocks, dtype=torch.int32, device=device)
            self._numbers = torch.arange(size + 1, dtype=torch.int32, device=device)

    def size_for(self, num_rows: int) -> int | None:
        at = bisect_left(self._sizes, num_rows)
        return self._sizes[at] if at < len(self._sizes) and self._captured else None

    def padded(self, inputs: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
        """What such a step has to be told."""
        num_rows, width = inputs["block_tables"].shape
        tables = np.full((size, width), self._nobodys_block, np.int32)
        tables[:num_rows] = inputs["block_tables"]
        ids_and_lens = np.zeros((2, size), np.int32)
        ids_and_lens[:, :num_rows] = inputs["token_ids"], inputs["context_lens"]
        return {"ids_and_lens": ids_and_lens, "block_tables": tables}

    def replay(self, sent: Mapping[str, Tensor], size: int) -> Tensor:
        """f32 [size, V]: overwritten by the next one."""
        captured, tables = self._captured[size], sent["block_tables"]
        captured.inputs["ids_and_lens"].copy_(sent["ids_and_lens"], non_blocking=True)
        captured.inputs["block_tables"][:, : tables.shape[1]].copy_(tables, non_blocking=True)
        captured.graph.replay()
        return captured.logits

    def capture(self, run: Run, nobodys_block: int) -> None:
        """For the caches that are allocated now."""
        self._nobodys_block = nobodys_block
        if not self._sizes:
            return
        started, free = time.monotonic(), torch.cuda.mem_get_info(self._device)[0]
        self._tables.fill_(nobodys_block)
        pool = None
        for size in reversed(self._sizes):  # the largest first: the others find room in its memory
            inputs = self._inputs(size)
            run(inputs)  # whatever is compiled or set up at the first call
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool):
                logits = run(inputs)
            pool = graph.pool()
            self._captured[size] = Captured(graph, inputs, logits)
        used = free - torch.cuda.mem_get_info(self._device)[0]
        seconds = time.monotonic() - started
        log.info("%d CUDA graphs captured in %.1f s, %.2f GB", len(self._sizes), seconds, used / 1e9)

    def clear(self) -> None:
        self._captured.clear()

    def _inputs(self, size: int) -> dict[str, Tensor]:
        ids_and_lens = torch.zeros(2, size, dtype=torch.int32, device=self._device)
        token_ids, context_lens = ids_and_lens
        return {
            "ids_and_lens": ids_and_lens,
            "token_ids": token_ids,
            "positions": context_lens,
            "context_lens": context_lens,
            "query_starts": self._numbers[: size + 1],
            "block_tables": self._tables[:size],
            "logit_rows": self._numbers[:size],
        }


def capture_sizes(text: str, most: int) -> list[int]:
    """Those of CUDAGRAPH_CAPTURE_SIZES up to `most` and the next above it, which a batch of that size needs."""
    sizes = sorted({int(each) for each in text.split(",")})
    return [*[size for size in sizes if size < most], most] if sizes[-1] >= most else sizes
