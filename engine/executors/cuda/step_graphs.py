"""CUDA graphs of steps: what a step launches, recorded once; replaying it costs the host microseconds, not a call for
each op. Which steps are recorded, and how a step is made to look like one that was.

Two kinds: decode steps, where every request has one token, by the number of requests (CUDAGRAPH_CAPTURE_SIZES), and
steps with prompts in them by the number of tokens, which any number of requests may share. A step takes the next larger
one. Tokens that only fill it up belong to a request of nobody's and write into nobody's block.
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

from engine.executors.cuda.cache import MIN_BLOCK_SIZE
from engine.executors.cuda.program import GROUPS, Outputs
from engine.settings.config import Config

log = logging.getLogger(__name__)

TOKENS = (64, 128, 256, 512)  # of steps with prompts; above, the GPU takes longer than the host
NAMES = ("token_ids", "positions", "query_starts", "context_lens", "logit_rows")  # inputs of one axis
Run = Callable[[Mapping[str, Tensor]], Outputs]
Arrays = dict[str, np.ndarray]


class Shape(NamedTuple):
    """Where it has as many requests as tokens, of a decode step."""

    num_tokens: int
    num_requests: int
    num_logits: int


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    numbers: Tensor  # the inputs NAMES one after another
    tables: Tensor
    more: Mapping[str, Tensor]
    outputs: Outputs


class StepGraphs:
    """`max_blocks`: of the longest request, in a block table. `of_adapters`: what a step with adapters has beside the
    usual inputs, by its numbers of tokens and logits; such steps are recorded apart."""

    def __init__(
        self,
        config: Config,
        max_blocks: int,
        device: torch.device,
        of_adapters: Callable[[tuple[int, int]], Arrays] | None = None,
    ):
        self._device, self._of_adapters = device, of_adapters
        self._width = max(max_blocks, TOKENS[-1] // MIN_BLOCK_SIZE)  # that nobody's request needs, too
        is_used = config.use_cudagraph and device.type == "cuda"
        self._decodes = decode_shapes(config.cudagraph_capture_sizes, config.batch_size) if is_used else []
        self._prompts = prompt_shapes(config.batch_size, config.max_step_tokens) if is_used else []
        self._captured: dict[tuple[Shape, bool], Captured] = {}
        self.nobodys_block = 0

    def shape_for(self, inputs: Arrays) -> Shape | None:
        """Of the graph that takes a step with these inputs; None: it has to be launched op by op."""
        num_tokens, num_requests, num_logits = (
            len(inputs[name]) for name in ("token_ids", "context_lens", "logit_rows")
        )
        shapes = self._decodes if num_tokens == num_requests == num_logits else self._prompts
        at = bisect_left(shapes, (num_tokens,))
        return shapes[at] if at < len(shapes) and num_logits <= shapes[at].num_logits else None

    def replay(self, sent: Mapping[str, Tensor], shape: Shape) -> Outputs:
        """Of shape.num_logits rows: overwritten by the next one. `sent`: of `padded`."""
        captured, tables = self._captured[shape, GROUPS in sent], sent["block_tables"]
        for name, tensor in captured.more.items():
            tensor.copy_(sent[name], non_blocking=True)
        captured.numbers.copy_(sent["numbers"], non_blocking=True)
        captured.tables[:, : tables.shape[1]].copy_(tables, non_blocking=True)
        captured.graph.replay()
        return captured.outputs

    def capture(self, run: Run, nobodys_block: int) -> None:
        """For the caches that are allocated now."""
        self.nobodys_block = nobodys_block
        shapes = sorted(
            [*self._decodes, *self._prompts], reverse=True
        )  # those after the largest find room in its memory
        if not shapes:
            return
        started, free = time.monotonic(), torch.cuda.mem_get_info(self._device)[0]
        most = max(shape.num_requests for shape in shapes)
        tables = torch.full((most, self._width), nobodys_block, dtype=torch.int32, device=self._device)  # of all shapes
        pool = torch.cuda.graph_pool_handle()
        for shape in shapes:
            for is_adapted in (False, True)[: 1 + bool(self._of_adapters)]:
                self._captured[shape, is_adapted] = self._record(run, shape, (tables, pool), is_adapted)
        used, seconds = free - torch.cuda.mem_get_info(self._device)[0], time.monotonic() - started
        log.info("%d CUDA graphs captured in %.1f s, %.2f GB", len(self._captured), seconds, used / 1e9)

    def _record(self, run: Run, shape: Shape, shared: tuple[Tensor, tuple[int, int]], is_adapted: bool) -> Captured:
        arrays, more = empty_step(shape), {}
        tables, pool = shared[0][: shape.num_requests], shared[1]
        numbers = torch.from_numpy(np.concatenate([arrays[name] for name in NAMES])).to(self._device)
        inputs = dict(zip(NAMES, numbers.split([len(arrays[name]) for name in NAMES]), strict=True))
        if is_adapted and self._of_adapters:
            groups = self._of_adapters((shape.num_tokens, shape.num_logits))
            more = {name: torch.from_numpy(array).to(self._device) for name, array in groups.items()}
        inputs |= {"block_tables": tables, **more}
        run(inputs)  # whatever is compiled or set up at the first call
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):  # NCCL has a thread
            outputs = run(inputs)
        return Captured(graph, numbers, tables, more, outputs)

    def clear(self) -> None:
        self._captured.clear()

    def padded(self, inputs: Arrays, shape: Shape) -> Arrays:
        """What such a step has to be told: `numbers`, the inputs NAMES one after another, and `block_tables`."""
        step = empty_step(shape)
        step["query_starts"][:] = np.maximum(step["query_starts"], len(inputs["token_ids"]))
        for name in NAMES:
            step[name][: len(inputs[name])] = inputs[name]
        num_requests, width = inputs["block_tables"].shape
        tables = np.full((shape.num_requests, width), self.nobodys_block, np.int32)
        tables[:num_requests] = inputs["block_tables"]
        return {"numbers": np.concatenate([step[name] for name in NAMES]), "block_tables": tables}


def empty_step(shape: Shape) -> Arrays:
    """One whose tokens are all nobody's: in a decode step one of each request, else all of the last request."""
    num_tokens, num_requests, num_logits = shape
    starts = np.arange(num_requests + 1) if num_tokens == num_requests else np.zeros(num_requests + 1)
    sizes = {"token_ids": num_tokens, "positions": num_tokens, "context_lens": num_requests}
    arrays = {name: np.zeros(size, np.int32) for name, size in sizes.items()}
    return arrays | {"query_starts": starts.astype(np.int32), "logit_rows": np.arange(num_logits, dtype=np.int32)}


def decode_shapes(sizes: str, batch_size: int) -> list[Shape]:
    """Of the sizes up to `batch_size`, and of that one where a larger size is listed."""
    wanted = {min(int(size), batch_size) for size in sizes.split(",")}
    return [Shape(size, size, size) for size in sorted(wanted)]


def prompt_shapes(batch_size: int, max_tokens: int) -> list[Shape]:
    """One request more than there can be, which is nobody's; never as many as tokens."""
    shapes = []
    for num_tokens in TOKENS:
        num_requests = batch_size + 1 + (batch_size + 1 == num_tokens)
        if num_tokens <= max_tokens:
            shapes.append(Shape(num_tokens, num_requests, min(num_tokens, num_requests)))
    return shapes
