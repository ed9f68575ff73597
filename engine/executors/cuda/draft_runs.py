"""Runs of a draft model on the device. A run computes known tokens and then, without the host, one draft token after
another. Runs of usual shapes are captured as CUDA graphs: one of a run with as many tokens as possible, and for shorter
runs one of the first step and one of a further step, which is replayed for each further token.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.executors.cuda.cache import MIN_BLOCK_SIZE
from engine.executors.cuda.compilation import KernelCompiler
from engine.executors.cuda.graph_capture import GraphCapture, capture_graphs
from engine.executors.cuda.host_transfers import IN_FLIGHT, Uploads
from engine.executors.cuda.program import CudaProgram
from engine.executors.cuda.sampling import ALWAYS
from engine.executors.cuda.step_shapes import (
    Arrays,
    Shape,
    decode_shapes,
    num_packed,
    pad_table,
    padded_inputs,
    padding_step,
    unpack_inputs,
)
from engine.models.layers import PREVIOUS_STATES
from engine.ops.cuda.drafted_tokens import DraftedTokens
from engine.ops.cuda.prefill_attention import KnownStarts
from engine.ops.cuda.sampler import GREEDY, SamplingMode, sample
from engine.ops.cuda.step_buffers import StepBuffers
from engine.ops.sampling_rows import SamplingRows
from engine.settings.config import Config

STATE_ROWS = "state_rows"  # i32 [T]: rows of the kept states, see `DraftRuns.states`
VERIFIED = "verified"  # i32 [3, S], see `DraftedTokens.verify`
FIELDS = ("seed", "counter", *(name for name in ALWAYS if name not in ("seed", "counter")))  # those of 8 bytes first
DRAFT_MODES = GREEDY, SamplingMode(True, True, True)  # without and with rows that are not greedy


class DraftSizes(NamedTuple):
    """Bounds of the runs of a draft model."""

    max_rows: int  # rows that sample
    max_drafts: int  # of a row in one run
    max_blocks: int  # of a row in its block table


class DraftRuns:
    """Runs of a draft model, op by op. Owns what lives on the device between the steps of a run.

    `states` [N, H] has the hidden states that a layer of the target model reads beside tokens; None for a model that
    reads only tokens.
    """

    def __init__(
        self,
        program: CudaProgram,
        sizes: DraftSizes,
        tokens: DraftedTokens,
        states: Tensor | None,
        device: torch.device,
    ):
        self._program, self.tokens, self.states = program, tokens, states
        self._caches: Mapping[str, Tensor] = {}
        self._max_drafts = sizes.max_drafts
        self._starts = torch.arange(sizes.max_rows + 1, dtype=torch.int32, device=device)
        self._previous = None if states is None else states.new_zeros(sizes.max_rows, states.shape[1])

    def set_caches(self, caches: Mapping[str, Tensor]) -> None:
        """Set the KV caches that every step updates, by the names of the graph's inputs."""
        self._caches = caches

    def first(self, sent: Mapping[str, Tensor], mode: SamplingMode) -> None:
        """Compute the first step of a run. Sample a token for each of the `logit_rows`, if there are any."""
        if len(sent["logit_rows"]):
            self.tokens.verify(sent[VERIFIED], sent, sent["counter"])
        inputs: dict[str, Tensor | KnownStarts] = {**sent, **self._caches}
        usual_tokens = self._max_drafts + 1
        if len(sent["token_ids"]) <= usual_tokens * len(sent["context_lens"]):
            inputs["query_starts"] = KnownStarts(sent["query_starts"], usual_tokens=usual_tokens)
        if self.states is not None:
            inputs[PREVIOUS_STATES] = self.states.index_select(0, sent[STATE_ROWS])
        outputs = self._program(inputs)
        if len(sent["logit_rows"]):
            self.tokens.begin(sent["positions"].index_select(0, sent["logit_rows"]))
            self._sample(outputs.logits, outputs.hidden, sent, mode)

    def following(self, sent: Mapping[str, Tensor], mode: SamplingMode) -> None:
        """Compute the tokens that the step before has sampled, and sample another one behind each."""
        count = len(sent["logit_rows"])
        positions = self.tokens.positions[:count]
        inputs: dict[str, Tensor | None] = {
            "token_ids": self.tokens.token_ids[:count],
            "positions": positions,
            "query_starts": self._starts[: count + 1],
            "context_lens": positions,
            "block_tables": sent["block_tables"][:count],
            "logit_rows": None,
        }
        if self._previous is not None:
            inputs[PREVIOUS_STATES] = self._previous[:count]
        outputs = self._program({**inputs, **self._caches})
        self._sample(outputs.logits, outputs.hidden, sent, mode)

    def _sample(self, logits: Tensor, hidden: Tensor, sent: Mapping[str, Tensor], mode: SamplingMode) -> None:
        token_ids = sample(logits, {name: sent[name] for name in FIELDS}, mode)["token_ids"]
        if self._previous is not None:
            self._previous[: len(hidden)].copy_(hidden)
        self.tokens.add(token_ids, sent["counter"])


class CapturedRun(NamedTuple):
    """Captured steps of the runs of one shape, by the way to sample."""

    static_inputs: Mapping[str, Tensor]  # the graphs do not keep them alive
    empty: Arrays  # host values of the inputs except the block tables, for a run of padding
    first: dict[SamplingMode, torch.cuda.CUDAGraph]
    following: dict[SamplingMode, torch.cuda.CUDAGraph]
    whole: dict[SamplingMode, torch.cuda.CUDAGraph]  # all steps of the longest run


class DraftRunGraphs:
    """Launches the runs of a draft model, from captured CUDA graphs where the shape allows it. Owns the graphs.

    Captured are runs of CUDAGRAPH_CAPTURE_SIZES rows, each of which has one token for each draft that was verified and
    one more. Padding tokens belong to a row behind them and write to the null block.
    """

    def __init__(self, runs: DraftRuns, config: Config, sizes: DraftSizes, device: torch.device):
        self._runs, self._device, self._sizes = runs, device, sizes
        self._uploads = Uploads(device)
        is_used = config.use_cudagraph and device.type == "cuda"
        captured = decode_shapes(config.cudagraph_capture_sizes, sizes.max_rows) if is_used else []
        self._shapes = [run_shape(shape.num_tokens, sizes.max_drafts) for shape in captured]
        self._captured: dict[Shape, CapturedRun] = {}
        self._tables: Tensor | None = None
        self._buffers: StepBuffers  # of the captured graphs
        self.null_block = 0

    def launch(self, arrays: Arrays, depth: int) -> None:
        """Launch a run that samples `depth` tokens for each of its `logit_rows`, which are those of the first rows.
        `arrays` are the inputs of the graph and those of `fields_of`."""
        mode = DRAFT_MODES[bool(arrays["temperature"].any())] if depth else DRAFT_MODES[0]
        if shape := self._shape_for(arrays):
            self._replay(arrays, shape, mode, depth)
            return
        sent = self._uploads.send(arrays)
        self._runs.first(sent, mode)
        for _ in range(depth - 1):
            self._runs.following(sent, mode)

    def _shape_for(self, inputs: Arrays) -> Shape | None:
        num_tokens, num_rows = len(inputs["token_ids"]), len(inputs["context_lens"])
        if len(inputs["logit_rows"]) < num_rows:
            return None
        fitting = (each for each in self._shapes if each.num_tokens >= num_tokens and each.num_logits >= num_rows)
        return next(fitting, None)

    def _replay(self, arrays: Arrays, shape: Shape, mode: SamplingMode, depth: int) -> None:
        captured, table = self._captured[shape], arrays["block_tables"]
        # The last row has all padding tokens, in the null block.
        width = max(table.shape[1], -(-(shape.num_tokens - len(arrays["token_ids"])) // MIN_BLOCK_SIZE))
        tables = pad_table(table, (shape.num_requests, width), self.null_block)
        self._buffers.write(padded_inputs(arrays, captured.empty), tables)
        if depth == self._sizes.max_drafts:
            captured.whole[mode].replay()
            return
        captured.first[mode].replay()
        for _ in range(depth - 1):
            captured.following[mode].replay()

    def capture(self, null_block: int, compiler: KernelCompiler | None = None) -> None:
        """Capture all graphs for the caches that are allocated now. `compiler` compiles their kernels first."""
        self.null_block = null_block
        if not self._shapes:
            return
        steps = {shape: empty_run(shape, self._runs.states is not None) for shape in reversed(self._shapes)}
        num_rows = max(shape.num_requests for shape in steps)
        width = max(self._sizes.max_blocks + 1, -(-self._shapes[-1].num_tokens // MIN_BLOCK_SIZE))
        tables = torch.full((num_rows, width), null_block, dtype=torch.int32, device=self._device)
        self._tables, num_numbers = tables, max(map(num_packed, steps.values())) + tables.numel()

        def record(capture: GraphCapture) -> dict[Shape, CapturedRun]:
            # Buffers count steps, and those of a dry run may not be launched.
            self._buffers = StepBuffers(IN_FLIGHT, num_numbers, 1, self._device)
            return {shape: self._record(shape, step, capture) for shape, step in steps.items()}

        self._captured = capture_graphs(record, self._device, compiler)

    def _record(self, shape: Shape, step: Arrays, capture: GraphCapture) -> CapturedRun:
        """Capture the steps of one shape."""
        assert self._tables is not None
        tables, parts, buffers = self._tables[: shape.num_requests], padded_inputs({}, step), self._buffers
        numbers = torch.from_numpy(np.concatenate(parts)).to(self._device)
        sent = {**unpack_inputs(numbers, step), "block_tables": tables}
        no_tables = np.full((shape.num_requests, 1), self.null_block, np.int32)

        def first(mode: SamplingMode) -> None:
            buffers.load(numbers, tables)
            self._runs.first(sent, mode)

        def whole(mode: SamplingMode) -> None:
            first(mode)
            for _ in range(self._sizes.max_drafts - 1):
                self._runs.following(sent, mode)

        captured = CapturedRun(sent, step, {}, {}, {})
        for mode in DRAFT_MODES:
            buffers.write(parts, no_tables)
            captured.first[mode], _ = capture(partial(first, mode))
            captured.following[mode], _ = capture(partial(self._runs.following, sent, mode))
            buffers.write(parts, no_tables)
            captured.whole[mode], _ = capture(partial(whole, mode))
        return captured

    def clear(self) -> None:
        self._captured, self._tables = {}, None


def fields_of(rows: SamplingRows) -> Arrays:
    """Return the fields of rows that sampling reads, by name, and VERIFIED for rows whose tokens are known."""
    return {name: getattr(rows, name) for name in FIELDS} | {VERIFIED: np.full((3, len(rows.values)), -1, np.int32)}


def run_shape(num_rows: int, max_drafts: int) -> Shape:
    """Return the shape of the first step of a captured run: its tokens, its rows with one for padding, and its logits.
    As many tokens as rows would mark a decode step."""
    num_tokens = num_rows * (max_drafts + 1)
    return Shape(num_tokens + (num_tokens == num_rows + 1), num_rows + 1, num_rows)


def empty_run(shape: Shape, has_states: bool) -> Arrays:
    """Build the inputs of a run of padding tokens."""
    arrays = fields_of(SamplingRows.greedy(shape.num_logits)) | padding_step(shape, 0)
    arrays["query_starts"][-1] = shape.num_tokens
    return arrays | ({STATE_ROWS: np.zeros(shape.num_tokens, np.int32)} if has_states else {})
