"""Model of one rank on a GPU: its program with weights and adapters, its KV caches, CUDA graphs and slots. It runs the
graph for a step and samples, and is independent of when steps are launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.core.types import PENDING, Batch, Row
from engine.errors import ConfigError
from engine.executors.cuda.adapters import CudaAdapters
from engine.executors.cuda.cache import Caches
from engine.executors.cuda.compilation import KernelCompiler
from engine.executors.cuda.expert_counter import DeviceCounter
from engine.executors.cuda.host_experts import HostExperts
from engine.executors.cuda.host_transfers import Download, Uploads
from engine.executors.cuda.load import RankFiles, load_program
from engine.executors.cuda.program import GROUPS, NUM_LOGITS, NUM_TOKENS, CudaProgram, Inputs, Outputs
from engine.executors.cuda.step_graphs import Captured, OptionalInputs, SampledTokens, StepGraphs
from engine.executors.cuda.step_shapes import CHOICE, KEPT_ROWS, MAX_VERIFYING, Arrays, uncaptured_inputs
from engine.executors.expert_usage import ExpertUsage, routed_layers
from engine.executors.slots import Choices, Slots
from engine.executors.spans import SlotSpans
from engine.exporting.manifest import DECODER, Manifest, rank_dir
from engine.models.layers import SPAN_EMBEDDINGS
from engine.models.weights import experts_of_rank
from engine.ops import cuda
from engine.ops.cpu.group import Membership
from engine.ops.cuda import invariant, prefill_attention
from engine.ops.cuda.prefill_attention import KnownStarts
from engine.ops.cuda.sampler import SamplingMode, sample
from engine.ops.sampling_rows import SamplingRows
from engine.settings.config import Config

TABLE = "embed_tokens.weight"


class LaunchedModel(NamedTuple):
    """Model outputs of a launched step, and what sampling its tokens needs."""

    outputs: Outputs  # one row for each requested token
    sent: Mapping[str, Tensor]  # sampling inputs on the device, by name
    captured: Captured | None  # set if its recorded sampling can be replayed; nothing is in `sent` then


class KeptStates(NamedTuple):
    """Memory for the hidden states of the tokens of steps, and the function that returns the rows of these."""

    memory: Tensor  # [N, H]
    rows_of: Callable[[Sequence[Row]], np.ndarray]


class ModelRunner:
    """The model of one rank. Owns the program, the KV caches, the captured CUDA graphs, the slots and the adapters.

    The sampled tokens stay on the device, where the next step reads them. Raises ConfigError if the model does not fit
    the settings or the device.
    """

    def __init__(self, graph_dir: Path, config: Config, device: torch.device, membership: Membership):
        model = Manifest.read(graph_dir)
        max_blocks = -(-model.max_seq_len // model.block_size)
        self.graph_dir, self.device, self._membership = graph_dir, device, membership
        self._is_invariant = config.batch_invariant
        self.samples = membership.rank == 0  # the other ranks receive the tokens
        ops = invariant if self._is_invariant else cuda
        self.host_experts = HostExperts(num_bytes, device) if (num_bytes := config.host_expert_bytes) else None
        self.program = load_program(self._files(DECODER), device, ops, host_experts=self.host_experts)
        self.dtype = self.program.params[TABLE].dtype  # of activations
        if membership.num_ranks > 1 and self.dtype == torch.float16:
            text = f"MP_NUM is {membership.num_ranks}, with float16 it must be 1: export with DTYPE=bfloat16"
            raise ConfigError(text)
        self.caches = Caches(model.graph().caches, device)
        self.adapters, self._adapted = None, self.program
        if config.has_loras:
            place = membership.rank, membership.num_ranks
            self.adapters = CudaAdapters(graph_dir, place, config, self.program.params[TABLE])
            self._adapted = CudaProgram(self.program.graph, self.program.params, ops, self.adapters.layers)
        self.expert_usage = self._count_experts(model.num_ranks if model.expert_parallel else 1)
        groups, spans = model.graph().cache_groups, SlotSpans.of(self.program.graph, config.batch_size)
        self.takes_spans = spans is not None
        self.slots = Slots(config.batch_size, max_blocks, model.block_size, model.vocab_size, groups, spans)
        of_adapters = self.adapters.no_groups if self.adapters else None
        optional = OptionalInputs(len(groups), of_adapters, spans, self.expert_usage is not None)
        most = max(max_blocks, *(group.num_parts for group in groups))
        self.graphs = StepGraphs(config, most, device, optional)
        self._uploads = Uploads(device)
        # One token for each slot, and one for padding. Behind them are the draft tokens of a run.
        self._first_draft, num_drafts = config.batch_size + 1, config.speculate_max_draft_token_num
        num_tokens = self._first_draft + num_drafts * config.batch_size * (config.speculate_method != "none")
        self._last_tokens = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        # Those of the last step, unless it has samples behind longer pieces of an answer than drafts are.
        most = max((1 + num_drafts) * config.batch_size, MAX_VERIFYING)
        self.chosen_tokens = self._last_tokens.new_zeros(most)
        self._no_embeddings = torch.zeros(1, self.program.params[TABLE].shape[1], device=device)
        self._kept_states: KeptStates | None = None
        self.kept_rows = np.zeros(0, np.int64)  # of the tokens of the last step, if their states are kept

    def load_graph(self, name: str) -> CudaProgram:
        """Load another graph of the model, which shares parameters of the same name with this one. Raises ModelError
        that lists the graphs there are."""
        return load_program(self._files(name), self.device, cuda, self.program.params)

    def keep_states(self, num_rows: int, rows_of: Callable[[Sequence[Row]], np.ndarray]) -> Tensor:
        """Let each step write the hidden states of its tokens to a memory, which is returned: [num_rows, H], zeros.
        `rows_of` returns the places of the tokens there, i64. Padding is written to the last one."""
        table = self.program.params[TABLE]
        self._kept_states = KeptStates(table.new_zeros(num_rows, table.shape[1]), rows_of)
        self.graphs.keep_states(num_rows - 1)
        return self._kept_states.memory

    @property
    def draft_tokens(self) -> tuple[Tensor, int]:
        """Return the memory of the draft tokens of a run, i32 [drafts * slots], and the token id that stands for the
        first of them in a row of a step. Those behind it have the next lower ids."""
        return self._last_tokens[self._first_draft :], -2 - self._first_draft

    def fresh_lengths(self, max_tokens: int) -> list[int]:
        """Return the lengths of new prompts, up to `max_tokens`, for which cuDNN prepares a plan."""
        [cache, *_] = self.caches.tensors.values()
        if self._is_invariant or not prefill_attention.are_taken(self.dtype, cache):
            return []
        return list(range(prefill_attention.SHORTEST, max_tokens + 1, prefill_attention.STEP))

    def allocate(self, num_blocks: int, compiler: KernelCompiler | None) -> None:
        """Allocate the KV caches and capture the CUDA graphs, whose kernels `compiler` compiles."""
        self.free()
        self.caches.allocate(num_blocks)
        sampled = SampledTokens(self._last_tokens, self.chosen_tokens) if self.samples else None
        self.graphs.capture(self.compute, sampled, self.caches.null_block, compiler)

    def free(self) -> None:
        """Free the KV caches and the CUDA graphs."""
        self.graphs.clear()
        self.caches.clear()

    def launch(self, batch: Batch, choices: Choices, fields: Arrays) -> LaunchedModel:
        """Launch the graph. `fields` are further arrays that the step needs on the device."""
        inputs = self.slots.graph_inputs(batch)
        _mark_pending(batch, inputs)
        if self.expert_usage:
            inputs[NUM_TOKENS], inputs[NUM_LOGITS] = (
                np.array([len(inputs[name])], np.int32) for name in ("token_ids", "logit_rows")
            )
        num_logits, shape = len(inputs["logit_rows"]), self.graphs.shape_for(inputs)
        groups = {}
        if self.adapters and self.slots.adapters:
            sizes = (shape.num_tokens, shape.num_logits) if shape else (len(inputs["token_ids"]), num_logits)
            groups = self.adapters.groups(self.slots.adapters, batch, inputs, sizes)
        more = {**groups, **fields, "slots": np.array(choices.slots, np.int64)}
        if self._kept_states:
            more[KEPT_ROWS] = self.kept_rows = self._kept_states.rows_of(batch.rows)
        if shape:
            captured = self.graphs.replay(inputs | more, shape)
            left = uncaptured_inputs(more, captured.empty)
            outputs = captured.outputs.first(num_logits)
            if not left and choices.logit_rows is None and not batch.has_mask:
                return LaunchedModel(outputs, {}, captured)
            static = {
                name: tensor[: len(choices.slots)] for name, tensor in captured.static_inputs.items() if name in CHOICE
            }
            return LaunchedModel(outputs, static | (self._uploads.send(left) if left else {}), None)
        sent = self._uploads.send(inputs | more)
        chunks = [] if self._is_invariant else prefill_attention.find(inputs["query_starts"], inputs["context_lens"])
        known = {"query_starts": KnownStarts(sent["query_starts"], chunks)} if chunks else {}
        return LaunchedModel(self.compute({**sent, **known}), sent, None)

    def compute(self, inputs: Inputs) -> Outputs:
        """Run the graph on inputs that are on the device, and share the tokens of the first rank."""
        token_ids = cuda.broadcast(cuda.last_tokens_in(inputs["token_ids"], self._last_tokens))
        program = self._adapted if GROUPS in inputs else self.program
        outputs = program(
            {SPAN_EMBEDDINGS: self._no_embeddings, **inputs, **self.caches.tensors, "token_ids": token_ids}
        )
        if self._kept_states:
            assert outputs.states is not None, "the graph has no hidden states"
            self._kept_states.memory.index_copy_(0, inputs[KEPT_ROWS], outputs.states)
        return outputs

    def sample(self, logits: Tensor, rows: SamplingRows, launched: LaunchedModel) -> Download:
        """Start sampling and the download of its results. `logits` is [num_choices, V]; `rows` are the sampling rows on
        the host."""
        mode = SamplingMode.of(rows)
        if launched.captured:
            return Download({"token_ids": self.graphs.choose(launched.captured, mode, len(logits))}, self.device)
        masks = {} if rows.mask is None else self._uploads.send({"mask": rows.mask})
        sent = {**launched.sent, **masks}
        sampled = sample(logits, sent, mode, int(rows.num_logprobs.max()))
        token_ids = sampled["token_ids"]
        self._last_tokens.index_copy_(0, sent["slots"], token_ids)
        if len(token_ids) <= len(self.chosen_tokens):
            self.chosen_tokens[: len(token_ids)].copy_(token_ids)
        return Download.of(sampled, self.device)

    def close(self) -> None:
        """Free the weights as well."""
        self.free()
        if self.host_experts:
            self.host_experts.close()
        del self.program, self._adapted, self.adapters, self.host_experts

    def _files(self, name: str) -> RankFiles:
        """Return the files of a graph of the model."""
        directory = rank_dir(self.graph_dir, self._membership.rank)
        return RankFiles(directory, Manifest.read(self.graph_dir).graph(name), self._membership.expert_orders)

    def _count_experts(self, num_ranks: int) -> ExpertUsage | None:
        """Let steps count the choices of experts, on the first rank, and on others for their experts on the host.
        `num_ranks`: that have different experts."""
        routed, rank = routed_layers(self.program.graph), self._membership.rank
        if not routed or (rank and not self.host_experts):
            return None
        counter = DeviceCounter(len(routed), routed[0].num_experts, self.device)
        for program in {self.program, self._adapted}:
            program.count_in(counter.counts)
        if self.host_experts:
            first = experts_of_rank(routed[0].num_experts, rank % num_ranks, num_ranks).start
            self.host_experts.observe(counter.counts[:, first:])
        return ExpertUsage(routed, counter, num_ranks, self._membership.expert_orders)


def _mark_pending(batch: Batch, inputs: dict[str, np.ndarray]) -> None:
    """Replace each PENDING token by -2 - slot, which stands for the slot's last sampled token
    (`cuda.last_tokens_in`)."""
    is_pending = inputs["token_ids"] == PENDING
    if is_pending.any():
        slots = np.array([row.slot for row in batch.rows], np.int32)
        slot_of_token = np.repeat(slots, np.diff(inputs["query_starts"]))
        inputs["token_ids"] = np.where(is_pending, -2 - slot_of_token, inputs["token_ids"])
