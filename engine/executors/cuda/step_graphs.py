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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.core.cache_groups import table_name
from engine.executors.cuda.cache import MIN_BLOCK_SIZE
from engine.executors.cuda.compilation import Compiler
from engine.executors.cuda.program import GROUPS, Inputs, Outputs
from engine.executors.cuda.sampling import CAPTURED
from engine.executors.cuda.transfer import IN_FLIGHT
from engine.executors.spans import SlotSpans
from engine.models.layers import SPAN_EMBEDDINGS
from engine.ops.cuda.mailbox import Mailbox
from engine.ops.cuda.sampler import CUTS, Cuts, sample
from engine.ops.sampling_rows import SamplingRows
from engine.sampling_parameters import PARAMETERS
from engine.settings.config import Config

log = logging.getLogger(__name__)

TOKENS = (64, 128, 256, 512)  # of steps with prompts; above, the GPU takes longer than the host
# What a choice reads of each row, those of 8 bytes first, which have to lie so.
CHOICE = ("seed", "counter", "slots", *CAPTURED)
DTYPES = {"seed": torch.int64, "counter": torch.int64, "slots": torch.int64}
DTYPES |= {each.name: torch.float32 for each in PARAMETERS if each.type is float}  # others int32
Run = Callable[[Inputs], Outputs]
Arrays = dict[str, np.ndarray]
Made = TypeVar("Made")
Pool = tuple[int, int]  # memory that captured graphs share


class Shape(NamedTuple):
    num_tokens: int
    num_requests: int
    num_logits: int

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_requests


Kind = tuple[Shape, bool]  # and whether the step has adapters


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    told: Mapping[str, Tensor]  # its inputs, and those of CHOICE
    empty: Arrays  # what it is told but for the block tables, of a step that is all nobody's
    outputs: Outputs
    choices: Mapping[Cuts, torch.cuda.CUDAGraph]


class StepGraphs:
    """`max_blocks`: of the longest request, in a block table. `of_adapters`: what a step with adapters has beside the
    usual inputs, by its numbers of tokens and logits; such steps are recorded apart. `num_groups`: cache groups, each
    with a block table."""

    def __init__(
        self,
        config: Config,
        max_blocks: int,
        device: torch.device,
        of_adapters: Callable[[tuple[int, int]], Arrays] | None = None,
        num_groups: int = 1,
    ):
        self._device, self._of_adapters, self._nobodys_slot = device, of_adapters, config.batch_size
        self._width = max(max_blocks, TOKENS[-1] // MIN_BLOCK_SIZE)  # that nobody's request needs, too
        self._table_names = [table_name(group) for group in range(num_groups)]
        is_used = config.use_cudagraph and device.type == "cuda"
        self._decodes = decode_shapes(config.cudagraph_capture_sizes, config.batch_size) if is_used else []
        self._prompts = prompt_shapes(config.batch_size, config.max_step_tokens) if is_used else []
        self._captured: dict[Kind, Captured] = {}
        self._tables: Tensor | None = None  # block tables that the graphs read, which do not keep their inputs alive
        self._mailbox: Mailbox  # of what is captured
        self.null_block = 0
        self.spans: SlotSpans | None = None  # of a graph that takes some

    def shape_for(self, inputs: Arrays) -> Shape | None:
        """Return that of the graph that takes a step with these inputs; None: it has to be launched op by op, as one
        with the embeddings of prompt spans."""
        if len(inputs.get(SPAN_EMBEDDINGS, ())):
            return None
        num_tokens, num_requests, num_logits = (
            len(inputs[name]) for name in ("token_ids", "context_lens", "logit_rows")
        )
        is_decode = num_tokens == num_requests and np.array_equal(inputs["logit_rows"], np.arange(num_tokens))
        shapes = self._decodes if is_decode else self._prompts
        at = bisect_left(shapes, (num_tokens,))
        return shapes[at] if at < len(shapes) and num_logits <= shapes[at].num_logits else None

    def replay(self, inputs: Arrays, shape: Shape) -> Captured:
        """With the outputs of shape.num_logits rows, overwritten by the next one."""
        captured = self._captured[shape, GROUPS in inputs]
        tables = [inputs[name] for name in self._table_names]
        num_padding = shape.num_tokens - len(inputs["token_ids"])
        self._mailbox.tell(filled_up(inputs, captured.empty), self._stacked(tables, shape.num_requests, num_padding))
        captured.graph.replay()
        return captured

    def choose(self, captured: Captured, cuts: Cuts, num_tokens: int) -> Tensor:
        """By what the last step was told: i32, on the host as soon as that has ended."""
        captured.choices[cuts].replay()
        return self._mailbox.answers(num_tokens)

    def capture(self, run: Run, last_tokens: Tensor | None, null_block: int, compiler: Compiler | None = None) -> None:
        """Capture all graphs for the caches that are allocated now. `last_tokens`: by slot; None for a rank that never
        chooses tokens. `compiler` compiles what they launch, in parallel."""
        self.null_block = null_block
        shapes = sorted([*self._decodes, *self._prompts], reverse=True)  # others find room in the memory of the largest
        if not shapes:
            return
        started, free = time.monotonic(), torch.cuda.mem_get_info(self._device)[0]
        kinds = [(shape, is_adapted) for shape in shapes for is_adapted in (False, True)[: 1 + bool(self._of_adapters)]]
        steps = {kind: self._empty_step(*kind) for kind in kinds}
        most = max(shape.num_requests for shape in shapes)
        num_rows = most * len(self._table_names)
        tables = torch.full(
            (num_rows, self._width), null_block, dtype=torch.int32, device=self._device
        )  # of all shapes
        self._tables = tables
        num_numbers = max(sum([array.nbytes // 4 for array in step.values()]) for step in steps.values())
        mailbox = partial(Mailbox, IN_FLIGHT, num_numbers + tables.numel(), most, self._device)
        if compiler:
            self._mailbox = mailbox()  # which counts the steps on both sides, and these are not launched
            with compiler.recording():
                self._record_all(run, steps, tables, last_tokens, None)
            compiler.compile()
        self._mailbox = mailbox()
        self._captured = self._record_all(run, steps, tables, last_tokens, torch.cuda.graph_pool_handle())
        used, seconds = free - torch.cuda.mem_get_info(self._device)[0], time.monotonic() - started
        log.info("CUDA graphs of %d steps captured in %.1f s, %.2f GB", len(self._captured), seconds, used / 1e9)

    def _record_all(
        self, run: Run, steps: Mapping[Kind, Arrays], tables: Tensor, last_tokens: Tensor | None, pool: Pool | None
    ) -> dict[Kind, Captured]:
        """Without a `pool` everything is launched once, and nothing captured."""
        all_captured = {}
        for (shape, is_adapted), step in steps.items():
            captured = self._record(run, step, tables[: shape.num_requests * len(self._table_names)], pool)
            if last_tokens is not None and shape.is_decode:
                captured = captured._replace(choices=self._record_choices(captured, last_tokens, pool))
            all_captured[shape, is_adapted] = captured
        return all_captured

    def _empty_step(self, shape: Shape, is_adapted: bool) -> Arrays:
        groups = self._of_adapters((shape.num_tokens, shape.num_logits)) if is_adapted and self._of_adapters else {}
        of_spans = self.spans.text_inputs(shape.num_tokens) if self.spans else {}
        return empty_step(shape, self._nobodys_slot) | of_spans | groups

    def _record(self, run: Run, step: Arrays, tables: Tensor, pool: Pool | None) -> Captured:
        mailbox, parts = self._mailbox, filled_up({}, step)
        numbers = torch.from_numpy(np.concatenate(parts)).to(self._device)
        told = apart(numbers, step)
        inputs: dict[str, Tensor | None] = {name: tensor for name, tensor in told.items() if name not in CHOICE}
        if CHOICE[0] in told:  # a decode step
            inputs["logit_rows"] = None
        by_group = tables.chunk(len(self._table_names))
        inputs.update(zip(self._table_names, by_group, strict=True))

        def taken() -> Outputs:
            mailbox.take(numbers, tables)
            return run(inputs)

        mailbox.tell(parts, self._stacked([np.empty((0, 1), np.int32)] * len(by_group), len(by_group[0])))
        graph, outputs = self._graph_of(taken, pool)
        return Captured(graph, told, step, outputs, {})

    def _record_choices(
        self, captured: Captured, last_tokens: Tensor, pool: Pool | None
    ) -> dict[Cuts, torch.cuda.CUDAGraph]:
        mailbox, told = self._mailbox, captured.told

        def choose(cuts: Cuts) -> None:
            token_ids = sample(captured.outputs.logits, told, cuts)["token_ids"]
            mailbox.answer(token_ids, told["slots"], last_tokens)

        return {cuts: self._graph_of(partial(choose, cuts), pool)[0] for cuts in CUTS}

    def _graph_of(self, run: Callable[[], Made], pool: Pool | None) -> tuple[torch.cuda.CUDAGraph, Made]:
        made, graph = run(), torch.cuda.CUDAGraph()  # libraries set something up at the first call
        torch.cuda.synchronize(self._device)
        if pool is None:
            return graph, made
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):  # NCCL has a thread
            made = run()
        return graph, made

    def _stacked(self, tables: Sequence[np.ndarray], num_requests: int, num_padding: int = 0) -> np.ndarray:
        """Return the block tables of all groups, one below the other, each filled up to `num_requests` rows and to the
        width of the first with the block that padding writes to.

        With several groups, a row of padding may be that of a request in another shape, so that it must hold all
        `num_padding` tokens: what lies behind it on the device are the request's blocks.
        """
        parts, width = [], tables[0].shape[1]
        if len(tables) > 1:
            width = max(width, -(-num_padding // MIN_BLOCK_SIZE))
        for table in tables:
            missing = num_requests - len(table), width - table.shape[1]
            is_whole = not any(missing)
            padding = ((0, missing[0]), (0, missing[1]))
            parts.append(table if is_whole else np.pad(table, padding, constant_values=self.null_block))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def clear(self) -> None:
        self._captured.clear()
        self._tables = None


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


def untold(inputs: Arrays, empty: Arrays) -> Arrays:
    """What a recorded step is not told of `inputs`: what it has no place for, or not for so many rows."""
    return {
        name: array for name, array in inputs.items() if name not in empty or array.shape[-1] > empty[name].shape[-1]
    }


def filled_up(inputs: Arrays, empty: Arrays) -> list[np.ndarray]:
    """Return all that a step is told, `empty` but for what `inputs` has, as i32 of one axis. What is missing is missing
    at the end of the last axis."""
    parts = []
    for name, whole in empty.items():
        array = inputs.get(name, whole)
        count, size = array.shape[-1], whole.shape[-1]
        if count > size:
            array = whole
        elif count < size:
            rest = whole[..., count:]
            if name == "query_starts":
                rest = np.maximum(rest, array[-1])
            array = np.concatenate([array, rest], axis=-1)
        parts.append(np.ascontiguousarray(array, whole.dtype).reshape(-1).view(np.int32))
    return parts


def apart(numbers: Tensor, step: Arrays) -> dict[str, Tensor]:
    """Return each array of the step from all of them together."""
    parts = numbers.split([array.nbytes // 4 for array in step.values()])
    return {
        name: part.view(DTYPES.get(name, torch.int32)).view(array.shape)
        for (name, array), part in zip(step.items(), parts, strict=True)
    }


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
