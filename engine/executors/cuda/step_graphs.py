"""CUDA graphs of steps: what a step launches, recorded once; replaying it costs the host microseconds, not a call for
each op. Which steps are recorded, and how a step is made to look like one that was. Of decode steps also how a token is
chosen, each way in a graph of its own.

Two kinds: decode steps, where every request has one token, by the number of requests (CUDAGRAPH_CAPTURE_SIZES), and
steps with prompts in them by the number of tokens, which any number of requests may share. A step takes the next larger
one. Tokens that only fill it up belong to a request of nobody's and write into nobody's block.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.executors.cuda.cache import MIN_BLOCK_SIZE
from engine.executors.cuda.program import GROUPS, Inputs, Outputs
from engine.ops.cuda.sampler import CUTS, Cuts
from engine.ops.sampling_rows import SamplingRows
from engine.settings.config import Config

log = logging.getLogger(__name__)

TOKENS = (64, 128, 256, 512)  # of steps with prompts; above, the GPU takes longer than the host
NAMES = ("token_ids", "positions", "query_starts", "context_lens", "logit_rows")  # inputs of one axis
# What a choice reads of each row, those of 8 bytes first, which have to lie so.
CHOICE = ("seed", "counter", "slots", "temperature", "top_p", "top_k", "min_p")
DTYPES = {"seed": torch.int64, "counter": torch.int64, "slots": torch.int64}
DTYPES |= {"temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32}  # others int32
Run = Callable[[Inputs], Outputs]
Choose = Callable[[Tensor, Mapping[str, Tensor], Cuts], dict[str, Tensor]]  # by logits and CHOICE: `token_ids`
Arrays = dict[str, np.ndarray]
Made = TypeVar("Made")


class Shape(NamedTuple):
    num_tokens: int
    num_requests: int
    num_logits: int

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_requests


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    numbers: Tensor  # those of `empty_step` one after another
    told: Mapping[str, Tensor]  # those of CHOICE
    tables: Tensor
    more: Mapping[str, Tensor]
    outputs: Outputs
    choices: Mapping[Cuts, tuple[torch.cuda.CUDAGraph, Tensor]]  # with the token ids

    def choose(self, cuts: Cuts) -> Tensor:
        """By what it is told: i32 [num_logits], overwritten by the next one."""
        graph, token_ids = self.choices[cuts]
        graph.replay()
        return token_ids


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
        self._device, self._of_adapters, self._nobodys_slot = device, of_adapters, config.batch_size
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
        is_decode = num_tokens == num_requests and np.array_equal(inputs["logit_rows"], np.arange(num_tokens))
        shapes = self._decodes if is_decode else self._prompts
        at = bisect_left(shapes, (num_tokens,))
        return shapes[at] if at < len(shapes) and num_logits <= shapes[at].num_logits else None

    def replay(self, sent: Mapping[str, Tensor], shape: Shape) -> Captured:
        """With the outputs of shape.num_logits rows, overwritten by the next one. `sent`: of `padded`."""
        captured, tables = self._captured[shape, GROUPS in sent], sent["block_tables"]
        for name, tensor in captured.more.items():
            tensor.copy_(sent[name], non_blocking=True)
        captured.numbers.copy_(sent["numbers"], non_blocking=True)
        captured.tables[:, : tables.shape[1]].copy_(tables, non_blocking=True)
        captured.graph.replay()
        return captured

    def capture(self, run: Run, choose: Choose | None, nobodys_block: int) -> None:
        """For the caches that are allocated now. `choose`: not of a rank that never does."""
        self.nobodys_block = nobodys_block
        shapes = sorted([*self._decodes, *self._prompts], reverse=True)  # others find room in the memory of the largest
        if not shapes:
            return
        started, free = time.monotonic(), torch.cuda.mem_get_info(self._device)[0]
        most = max(shape.num_requests for shape in shapes)
        tables = torch.full((most, self._width), nobodys_block, dtype=torch.int32, device=self._device)  # of all shapes
        pool = torch.cuda.graph_pool_handle()
        for shape in shapes:
            for is_adapted in (False, True)[: 1 + bool(self._of_adapters)]:
                captured = self._record(run, shape, (tables, pool), is_adapted)
                if choose:
                    captured = captured._replace(choices=self._record_choices(choose, captured, pool))
                self._captured[shape, is_adapted] = captured
        used, seconds = free - torch.cuda.mem_get_info(self._device)[0], time.monotonic() - started
        log.info("CUDA graphs of %d steps captured in %.1f s, %.2f GB", len(self._captured), seconds, used / 1e9)

    def _record(self, run: Run, shape: Shape, shared: tuple[Tensor, tuple[int, int]], is_adapted: bool) -> Captured:
        step, more = empty_step(shape, self._nobodys_slot), {}
        tables, pool = shared[0][: shape.num_requests], shared[1]
        numbers = torch.from_numpy(_together(step)).to(self._device)
        named = apart(numbers, step)
        inputs: dict[str, Tensor | None] = {name: named[name] for name in NAMES}
        if shape.is_decode:
            inputs["logit_rows"] = None
        if is_adapted and self._of_adapters:
            groups = self._of_adapters((shape.num_tokens, shape.num_logits))
            more = {name: torch.from_numpy(array).to(self._device) for name, array in groups.items()}
        inputs |= {"block_tables": tables, **more}
        graph, outputs = self._graph_of(partial(run, inputs), pool)
        told = {name: named[name] for name in CHOICE if name in named}
        return Captured(graph, numbers, told, tables, more, outputs, {})

    def _record_choices(
        self, choose: Choose, captured: Captured, pool: tuple[int, int]
    ) -> dict[Cuts, tuple[torch.cuda.CUDAGraph, Tensor]]:
        logits, told = captured.outputs.logits, captured.told
        choices = {}
        for cuts in CUTS if told else ():
            graph, sampled = self._graph_of(partial(choose, logits, told, cuts), pool)
            choices[cuts] = graph, sampled["token_ids"]
        return choices

    def _graph_of(self, run: Callable[[], Made], pool: tuple[int, int]) -> tuple[torch.cuda.CUDAGraph, Made]:
        run()  # whatever is compiled or set up at the first call
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):  # NCCL has a thread
            made = run()
        return graph, made

    def clear(self) -> None:
        self._captured.clear()

    def padded(self, inputs: Arrays, shape: Shape) -> Arrays:
        """What such a step has to be told: `numbers`, those of `empty_step` one after another, and what is left."""
        step = empty_step(shape, self._nobodys_slot)
        step["query_starts"][:] = np.maximum(step["query_starts"], len(inputs["token_ids"]))
        told = {name for name, array in step.items() if name in inputs and len(inputs[name]) <= len(array)}
        for name in told:
            step[name][: len(inputs[name])] = inputs[name]
        num_requests, width = inputs["block_tables"].shape
        tables = np.full((shape.num_requests, width), self.nobodys_block, np.int32)
        tables[:num_requests] = inputs["block_tables"]
        left = {name: array for name, array in inputs.items() if name not in told}
        return {**left, "numbers": _together(step), "block_tables": tables}


def empty_step(shape: Shape, nobodys_slot: int) -> Arrays:
    """One whose tokens are all nobody's: in a decode step one of each request, else all of the last request."""
    num_tokens, num_requests, num_logits = shape
    starts = np.arange(num_requests + 1) if shape.is_decode else np.zeros(num_requests + 1)
    arrays: Arrays = {}
    if shape.is_decode:
        rows = SamplingRows.greedy(num_logits)
        slots = np.full(num_logits, nobodys_slot)
        arrays = {name: slots if name == "slots" else getattr(rows, name) for name in CHOICE}
    sizes = {"token_ids": num_tokens, "positions": num_tokens, "context_lens": num_requests}
    arrays |= {name: np.zeros(size, np.int32) for name, size in sizes.items()}
    return arrays | {"query_starts": starts.astype(np.int32), "logit_rows": np.arange(num_logits, dtype=np.int32)}


def _together(step: Arrays) -> np.ndarray:
    return np.concatenate([np.ascontiguousarray(array).view(np.int32) for array in step.values()])


def apart(numbers: Tensor, step: Arrays) -> dict[str, Tensor]:
    """Each array of the step from all of them together."""
    parts = numbers.split([array.nbytes // 4 for array in step.values()])
    return {name: part.view(DTYPES.get(name, torch.int32)) for name, part in zip(step, parts, strict=True)}


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
