"""CUDA graphs of steps. The launches of a step are captured once; a replay costs the host microseconds instead of one
call for each op. Sampling is captured, too, where every token gives logits, in one graph for each mode of sampling.

There are three kinds: decode steps, with one token for each request, by the number of requests
(CUDAGRAPH_CAPTURE_SIZES), steps that verify drafts, and steps with prompts, both by the number of tokens, which any
number of requests may share. A step uses the next larger shape. Padding tokens belong to a dummy request and write to
the null block.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.core.cache_groups import table_name
from engine.executors.cuda.cache import MIN_BLOCK_SIZE
from engine.executors.cuda.compilation import KernelCompiler
from engine.executors.cuda.graph_capture import GraphCapture, capture_graphs
from engine.executors.cuda.host_transfers import IN_FLIGHT
from engine.executors.cuda.program import GROUPS, NUM_LOGITS, NUM_TOKENS, Inputs, Outputs
from engine.executors.cuda.step_shapes import (
    CHOICE,
    KEPT_ROWS,
    MAX_VERIFYING,
    Arrays,
    Shape,
    decode_shapes,
    num_packed,
    pad_table,
    padded_inputs,
    padding_step,
    prompt_shapes,
    unpack_inputs,
    verifying_shapes,
)
from engine.executors.spans import SlotSpans
from engine.models.layers import SPAN_EMBEDDINGS
from engine.ops.cuda.offloaded_experts import IN_PLACE
from engine.ops.cuda.prefill_attention import KnownStarts
from engine.ops.cuda.sampler import ALL_MODES, SamplingMode, sample
from engine.ops.cuda.step_buffers import StepBuffers
from engine.settings.config import Config

log = logging.getLogger(__name__)

Run = Callable[[Inputs], Outputs]
Kind = tuple[Shape, bool]  # shape, and whether the step has adapters


class SampledTokens(NamedTuple):
    """Memory of the sampled tokens on the device, i32."""

    last: Tensor  # by slot
    chosen: Tensor  # those of the last step, in the order of its choices


class Captured(NamedTuple):
    """Captured step: its CUDA graph with static inputs and outputs, and the graphs that sample its tokens."""

    graph: torch.cuda.CUDAGraph
    static_inputs: Mapping[str, Tensor]  # with those of CHOICE
    empty: Arrays  # host values of the inputs except the block tables, for a step of padding
    outputs: Outputs
    choices: Mapping[SamplingMode, torch.cuda.CUDAGraph]


class OptionalInputs(NamedTuple):
    """Inputs that the steps of some models or settings have besides those of every step."""

    num_groups: int = 1  # cache groups, each of which has a block table
    # Returns the inputs of a step with adapters from its numbers of tokens and logits. Such steps are captured
    # separately.
    of_adapters: Callable[[tuple[int, int]], Arrays] | None = None
    spans: SlotSpans | None = None  # if the graph takes prompt spans
    has_counts: bool = False  # steps count the choices of experts: they have NUM_TOKENS and NUM_LOGITS


class StepGraphs:
    """CUDA graphs of one executor. Owns the captured graphs and their static inputs.

    `max_blocks` is the largest number of blocks of a request in a block table.
    """

    def __init__(
        self,
        config: Config,
        max_blocks: int,
        device: torch.device,
        optional: OptionalInputs = OptionalInputs(),  # noqa: B008 - it is immutable
    ):
        self._device, self._optional, self._padding_slot = device, optional, config.batch_size
        self._width = max(max_blocks, MAX_VERIFYING // MIN_BLOCK_SIZE)  # a padding row may hold as many tokens
        self._table_names = [table_name(group) for group in range(optional.num_groups)]
        is_used = config.use_cudagraph and device.type == "cuda"
        self._decodes = decode_shapes(config.cudagraph_capture_sizes, config.batch_size) if is_used else []
        self._prompts = prompt_shapes(config.batch_size, config.max_step_tokens) if is_used else []
        may_draft = is_used and config.speculate_method != "none"
        self._verifying = verifying_shapes(config, self._decodes) if may_draft else []
        if config.experts_on_host:  # longer steps wait for copies by another stream
            self._decodes, self._prompts, self._verifying = (
                [shape for shape in shapes if shape.num_tokens <= IN_PLACE]
                for shapes in (self._decodes, self._prompts, self._verifying)
            )
        self._captured: dict[Kind, Captured] = {}
        self._tables: Tensor | None = None  # kept here, because the captured graphs do not keep their inputs alive
        self._buffers: StepBuffers  # of the captured graphs
        self.null_block = 0
        self._padding_row: int | None = None  # of KEPT_ROWS, only if the states are kept

    def keep_states(self, padding_row: int) -> None:
        """Give the steps that are captured from now on the input KEPT_ROWS, which is `padding_row` for padding."""
        self._padding_row = padding_row

    def shape_for(self, inputs: Arrays) -> Shape | None:
        """Return the shape of the graph that can run a step with these inputs. Return None if the step must be launched
        op by op, which includes steps with embeddings of prompt spans."""
        if len(inputs.get(SPAN_EMBEDDINGS, ())):
            return None
        num_tokens, num_requests, num_logits = (
            len(inputs[name]) for name in ("token_ids", "context_lens", "logit_rows")
        )
        if np.array_equal(inputs["logit_rows"], np.arange(num_tokens)):
            shapes = self._decodes if num_tokens == num_requests else self._verifying
            at = bisect_left(shapes, (num_tokens,))
            if at < len(shapes):
                return shapes[at]
            if num_tokens == num_requests:
                return None
        shapes = self._prompts
        at = bisect_left(shapes, (num_tokens,))
        return shapes[at] if at < len(shapes) and num_logits <= shapes[at].num_logits else None

    def replay(self, inputs: Arrays, shape: Shape) -> Captured:
        """Replay the graph of `shape` with these inputs. Its outputs have shape.num_logits rows and are overwritten by
        the next replay."""
        captured = self._captured[shape, GROUPS in inputs]
        tables = [inputs[name] for name in self._table_names]
        # In another shape a request may have the place of the row with the padding. The device still has that request's
        # blocks in the columns behind those that are written.
        is_exposed = len(tables) > 1 or shape.usual_tokens > 0
        num_padding = shape.num_tokens - len(inputs["token_ids"]) if is_exposed else 0
        self._buffers.write(
            padded_inputs(inputs, captured.empty), self._stack_tables(tables, shape.num_requests, num_padding)
        )
        captured.graph.replay()
        return captured

    def choose(self, captured: Captured, mode: SamplingMode, num_tokens: int) -> Tensor:
        """Replay the sampling of the last step. Return its tokens, i32, which are on the host as soon as it has
        ended."""
        captured.choices[mode].replay()
        return self._buffers.tokens(num_tokens)

    def capture(
        self, run: Run, sampled: SampledTokens | None, null_block: int, compiler: KernelCompiler | None = None
    ) -> None:
        """Capture all graphs for the caches that are allocated now.

        `sampled` receives the sampled tokens; it is None on a rank that never samples. `compiler` compiles the kernels
        of these steps first, in parallel.
        """
        self.null_block = null_block
        # The others reuse the memory of the largest.
        shapes = sorted({*self._decodes, *self._verifying, *self._prompts}, reverse=True)
        if not shapes:
            return
        started, free = time.monotonic(), torch.cuda.mem_get_info(self._device)[0]
        ways = (False, True) if self._optional.of_adapters else (False,)
        steps = {(shape, way): self._padding_step(shape, way) for shape in shapes for way in ways}
        num_rows = max(shape.num_requests for shape in shapes) * len(self._table_names)
        most = max((shape.num_logits for shape in shapes if shape.samples_all), default=1)
        tables = torch.full((num_rows, self._width), null_block, dtype=torch.int32, device=self._device)
        self._tables = tables  # shared by all shapes
        num_numbers = max(map(num_packed, steps.values())) + tables.numel()

        def record(capture: GraphCapture) -> dict[Kind, Captured]:
            # Buffers count steps, and those of a dry run are not launched.
            self._buffers = StepBuffers(IN_FLIGHT, num_numbers, most, self._device)
            return {kind: self._record(kind[0], step, run, sampled, capture) for kind, step in steps.items()}

        self._captured = capture_graphs(record, self._device, compiler)
        used, seconds = free - torch.cuda.mem_get_info(self._device)[0], time.monotonic() - started
        log.info("CUDA graphs of %d steps captured in %.1f s, %.2f GB", len(self._captured), seconds, used / 1e9)

    def _padding_step(self, shape: Shape, is_adapted: bool) -> Arrays:
        _, of_adapters, spans, has_counts = self._optional
        inputs: Arrays = {}
        if self._padding_row is not None:
            inputs[KEPT_ROWS] = np.full(shape.num_tokens, self._padding_row, np.int64)
        inputs |= padding_step(shape, self._padding_slot)
        if spans:
            inputs |= spans.text_inputs(shape.num_tokens)
        if is_adapted and of_adapters:
            inputs |= of_adapters((shape.num_tokens, shape.num_logits))
        if has_counts:
            inputs |= dict.fromkeys((NUM_TOKENS, NUM_LOGITS), np.zeros(1, np.int32))
        return inputs

    def _record(
        self, shape: Shape, step: Arrays, run: Run, sampled: SampledTokens | None, capture: GraphCapture
    ) -> Captured:
        """Capture one step, and the sampling of its tokens where each of them gives logits."""
        assert self._tables is not None
        tables = self._tables[: shape.num_requests * len(self._table_names)]
        buffers, parts = self._buffers, padded_inputs({}, step)
        numbers = torch.from_numpy(np.concatenate(parts)).to(self._device)
        static_inputs = unpack_inputs(numbers, step)
        inputs: dict[str, Tensor | KnownStarts | None] = {
            name: tensor for name, tensor in static_inputs.items() if name not in CHOICE
        }
        if shape.samples_all:
            inputs["logit_rows"] = None
        if shape.usual_tokens:
            inputs["query_starts"] = KnownStarts(static_inputs["query_starts"], usual_tokens=shape.usual_tokens)
        by_group = tables.chunk(len(self._table_names))
        inputs.update(zip(self._table_names, by_group, strict=True))

        def run_loaded() -> Outputs:
            buffers.load(numbers, tables)
            return run(inputs)

        def choose(mode: SamplingMode) -> None:
            assert sampled
            token_ids = sample(outputs.logits, static_inputs, mode)["token_ids"]
            buffers.store(token_ids, static_inputs["slots"], *sampled)

        buffers.write(parts, self._stack_tables([np.empty((0, 1), np.int32)] * len(by_group), len(by_group[0])))
        graph, outputs = capture(run_loaded)
        modes = ALL_MODES if sampled and shape.samples_all else ()
        choices = {mode: capture(partial(choose, mode))[0] for mode in modes}
        return Captured(graph, static_inputs, step, outputs, choices)

    def _stack_tables(self, tables: Sequence[np.ndarray], num_requests: int, num_padding: int = 0) -> np.ndarray:
        """Return the block tables of all groups, one below the other, each padded to `num_requests` rows and to the
        width of the widest with the null block. A padding row then holds at least `num_padding` tokens."""
        parts, width = [], max(-(-num_padding // MIN_BLOCK_SIZE), *(table.shape[1] for table in tables))
        for table in tables:
            parts.append(pad_table(table, (num_requests, width), self.null_block))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def clear(self) -> None:
        self._captured.clear()
        self._tables = None
