"""Executor on one GPU: uploads the inputs of a step in one copy, runs the graph and samples on the device.

`launch` returns before any of that has completed. The sampled token also stays on the device, where the next step reads
it, so that step can be launched before the host knows the token (`Row.token_ids` is then PENDING).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.core.types import PENDING, Batch, Row, StepOutput
from engine.errors import ConfigError
from engine.executors.cuda.adapters import CudaAdapters
from engine.executors.cuda.blocks import CudaBlocks
from engine.executors.cuda.cache import Caches
from engine.executors.cuda.compilation import KernelCompiler, warn_of_late_compilation
from engine.executors.cuda.draft_graph import CudaDraftGraph
from engine.executors.cuda.expert_counter import DeviceCounter
from engine.executors.cuda.host_cache import HostCache
from engine.executors.cuda.host_experts import HostExperts
from engine.executors.cuda.host_transfers import Download, Uploads
from engine.executors.cuda.load import RankFiles, load_program
from engine.executors.cuda.program import GROUPS, NUM_LOGITS, NUM_TOKENS, CudaProgram, Inputs, Outputs
from engine.executors.cuda.prompt_outputs import StepPromptOutputs
from engine.executors.cuda.sampling import fields_to_send
from engine.executors.cuda.step_graphs import Captured, OptionalInputs, SampledTokens, StepGraphs
from engine.executors.cuda.step_shapes import (
    CHOICE,
    KEPT_ROWS,
    MAX_VERIFYING,
    Arrays,
    uncaptured_inputs,
)
from engine.executors.cuda.vision_encoder import CudaVisionEncoder
from engine.executors.cuda.warm_up import StepLimits, warm_up_batches
from engine.executors.expert_usage import ExpertUsage, routed_layers
from engine.executors.image_inputs import ImageInputs
from engine.executors.nixl_blocks import with_nixl
from engine.executors.prompt_outputs import LOGITS_BYTES, max_prompt_logits
from engine.executors.rank_blocks import BlockAccess
from engine.executors.slots import Choices, Slots
from engine.executors.spans import SlotSpans
from engine.exporting.manifest import DECODER, Manifest, rank_dir
from engine.log import Report
from engine.models.layers import SPAN_EMBEDDINGS
from engine.models.vision import VISION_GRAPH
from engine.models.weights import experts_of_rank
from engine.ops import cuda
from engine.ops.cpu.group import Membership
from engine.ops.cuda import group, invariant, prefill_attention
from engine.ops.cuda.prefill_attention import KnownStarts
from engine.ops.cuda.sampler import SamplingMode, sample
from engine.ops.sampling_rows import SampledRows, SamplingRows
from engine.settings.config import Config

log = logging.getLogger(__name__)

TABLE = "embed_tokens.weight"
NO_CHOICES = Choices([], [], None)


class LaunchedModel(NamedTuple):
    """Model outputs of a launched step, and what sampling its tokens needs."""

    outputs: Outputs  # one row for each requested token
    sent: Mapping[str, Tensor]  # sampling inputs on the device, by name
    captured: Captured | None  # set if its recorded sampling can be replayed; nothing is in `sent` then


class KeptStates(NamedTuple):
    """Memory for the hidden states of the tokens of steps, and the function that returns the rows of these."""

    memory: Tensor  # [N, H]
    rows_of: Callable[[Sequence[Row]], np.ndarray]


class CudaExecutor:
    """Executor of one rank of the model, on the GPU with its number. Owns the program, the KV caches, the captured CUDA
    graphs, the slots and the adapters.

    Only the first rank samples tokens; it sends them to the others on the device. `device` is "cuda", or with the
    interpreter of the Triton language also "cpu", which then replaces the GPU of every rank.
    """

    max_drafts = 0
    draft_counts = None
    runs_ahead = True
    thread = None

    def __init__(
        self,
        graph_dir: Path,
        config: Config,
        device: str = "",
        membership: Membership | None = None,
        report: Report = lambda text: None,
    ):
        model = Manifest.read(graph_dir)
        max_blocks = -(-model.max_seq_len // model.block_size)
        self._membership = membership or Membership.alone()
        self.device = self._device = _device(device, self._membership)
        self._compiler = KernelCompiler(self._device, report) if self._device.type == "cuda" else None
        self._vocab_size = model.vocab_size
        self._max_tokens = min(config.max_step_tokens, model.max_seq_len)  # of one step
        self.graph_dir, self._utilization = graph_dir, config.gpu_memory_utilization
        self._logits_bytes = 4 * config.batch_size * model.vocab_size  # of the largest batch of sampled tokens
        self._config, self._is_invariant = config, config.batch_invariant
        ops = invariant if self._is_invariant else cuda
        self._host_experts = HostExperts(num_bytes, self._device) if (num_bytes := config.host_expert_bytes) else None
        self._program = load_program(self._files(DECODER), self._device, ops, host_experts=self._host_experts)
        self._check_type()
        self._caches = Caches(model.graph().caches, self._device)
        self._host_cache = HostCache(self._caches, config, self._device) if config.swap_space else None
        self._adapters, self._adapted = None, self._program
        if config.has_loras:
            place, table = (self._membership.rank, self._membership.num_ranks), self._program.params[TABLE]
            self._adapters = CudaAdapters(graph_dir, place, config, table)
            self._adapted = CudaProgram(self._program.graph, self._program.params, ops, self._adapters.layers)
        self.expert_usage = self._count_experts(model.num_ranks if model.expert_parallel else 1)
        self.cache_groups = model.graph().cache_groups
        most = max(max_blocks, *(group.num_parts for group in self.cache_groups))
        spans = SlotSpans.of(self._program.graph, config.batch_size)
        self.takes_spans = spans is not None
        of_adapters = self._adapters.no_groups if self._adapters else None
        optional = OptionalInputs(len(self.cache_groups), of_adapters, spans, self.expert_usage is not None)
        self._graphs = StepGraphs(config, most, self._device, optional)
        self._uploads = Uploads(self._device)
        self._slots = Slots(config.batch_size, max_blocks, model.block_size, model.vocab_size, self.cache_groups, spans)
        # One token for each slot, and one for padding. Behind them are the draft tokens of a run.
        self._first_draft, num_drafts = config.batch_size + 1, config.speculate_max_draft_token_num
        num_tokens = self._first_draft + num_drafts * config.batch_size * (config.speculate_method != "none")
        self._last_tokens = torch.zeros(num_tokens, dtype=torch.int32, device=self._device)
        # Those of the last step, unless it has samples behind longer pieces of an answer than drafts are.
        most = max((1 + num_drafts) * config.batch_size, MAX_VERIFYING)
        self.chosen_tokens = self._last_tokens.new_zeros(most)
        self._no_embeddings = torch.zeros(1, self._program.params[TABLE].shape[1], device=self._device)
        self._kept_states: KeptStates | None = None
        self.kept_rows = np.zeros(0, np.int64)  # of the tokens of the last step, if their states are kept
        self.vision: CudaVisionEncoder | None = None
        if self._membership.rank == 0 and config.enable_mm and VISION_GRAPH in model.graphs:
            tower, dtype = self.load_graph(VISION_GRAPH), self._program.params[TABLE].dtype
            self.vision = CudaVisionEncoder(tower, ImageInputs(graph_dir), self._device, dtype)
        self.block_size, self.block_bytes = model.block_size, self._caches.block_bytes
        self.max_prompt_logits = max_prompt_logits(model.vocab_size)

    def load_graph(self, name: str) -> CudaProgram:
        """Load another graph of the model, which shares parameters of the same name with this one. Raises ModelError
        that lists the graphs there are."""
        return load_program(self._files(name), self.device, cuda, self._program.params)

    def load_draft_graph(self, name: str) -> CudaDraftGraph:
        """Load the graph `name` of the model, which drafts for it."""
        return CudaDraftGraph.of_layer(name, self, self._config)

    def _files(self, name: str) -> RankFiles:
        """Return the files of a graph of the model."""
        directory = rank_dir(self.graph_dir, self._membership.rank)
        return RankFiles(directory, Manifest.read(self.graph_dir).graph(name), self._membership.expert_orders)

    def keep_states(self, num_rows: int, rows_of: Callable[[Sequence[Row]], np.ndarray]) -> Tensor:
        """Let each step write the hidden states of its tokens to a memory, which is returned: [num_rows, H], zeros.
        `rows_of` returns the places of the tokens there, i64. Padding is written to the last one."""
        table = self._program.params[TABLE]
        self._kept_states = KeptStates(table.new_zeros(num_rows, table.shape[1]), rows_of)
        self._graphs.keep_states(num_rows - 1)
        return self._kept_states.memory

    @property
    def draft_tokens(self) -> tuple[Tensor, int]:
        """Return the memory of the draft tokens of a run, i32 [drafts * slots], and the token id that stands for the
        first of them in a row of a step. Those behind it have the next lower ids."""
        return self._last_tokens[self._first_draft :], -2 - self._first_draft

    def free_bytes(self) -> int:
        """Return the bytes of the device that GPU_MEMORY_UTILIZATION leaves for the cache, after everything else that
        was needed so far."""
        if self._device.type != "cuda":
            return 1 << 30
        free, total = torch.cuda.mem_get_info(self._device)
        foreign = total - free - torch.cuda.memory_reserved(self._device)  # context, captured graphs, others
        own = torch.cuda.max_memory_allocated(self._device) - self._caches.num_bytes
        own += self.vision.num_bytes if self.vision else 0
        return max(0, int(total * self._utilization) - foreign - own - 2 * self._logits_bytes - LOGITS_BYTES)

    def allocate(self, num_blocks: int) -> None:
        group.join(self._membership, self._device)  # only now are all ranks known to have loaded
        self._graphs.clear()
        self._caches.clear()
        try:
            self._caches.allocate(num_blocks)
            sampled = None if self._membership.rank else SampledTokens(self._last_tokens, self.chosen_tokens)
            self._graphs.capture(self._compute, sampled, self._caches.null_block, self._compiler)
        except torch.cuda.OutOfMemoryError:
            free, total = (number / 2**30 for number in torch.cuda.mem_get_info(self._device))
            raise ConfigError(
                f"{num_blocks} KV blocks ({num_blocks * self.block_bytes / 2**30:.1f} GiB) and the CUDA graphs do not"
                f" fit into the {total:.1f} GiB of the GPU, {free:.1f} GiB are left: lower GPU_MEMORY_UTILIZATION or"
                " NUM_GPU_BLOCKS_OVERRIDE, or list fewer CUDAGRAPH_CAPTURE_SIZES"
            ) from None

    def warm_up(self) -> None:
        if not self._compiler:
            return
        limits = StepLimits(
            max_tokens=self._max_tokens,
            max_context=self._caches.null_block * self.block_size,
            max_requests=self._slots.num_slots,
            block_size=self.block_size,
            max_prompt_logits=self.max_prompt_logits,
            num_groups=len(self.cache_groups),
        )
        started, fresh_lengths = time.monotonic(), self._fresh_lengths()
        self._compiler.compile_missing(
            lambda: [
                self._run_alone(batch, wait=lambda step: torch.cuda.synchronize(self._device))
                for batch in warm_up_batches(limits, fresh_lengths[:1])
            ]
        )
        for batch in warm_up_batches(limits, fresh_lengths):
            self._run_alone(batch, wait=CudaStep.result)
        if self.vision:
            self.vision.warm_up()
        torch.cuda.reset_peak_memory_stats(self._device)
        warn_of_late_compilation()
        log.info("steps of every kind ran in %.1f s", time.monotonic() - started)

    def load_adapter(self, adapter: tuple[str, ...]) -> None:
        assert self._adapters, "no setting says that there may be adapters"
        self._adapters.load(adapter)

    def drop_adapter(self, adapter_id: str) -> None:
        if self._adapters:
            self._adapters.drop(adapter_id)

    def blocks(self) -> BlockAccess:
        """Return the access to the blocks that are allocated now."""
        return with_nixl(CudaBlocks(self._caches, self._device), self._config)

    def launch(self, batch: Batch) -> CudaStep:
        self._slots.place(batch)
        if self._host_experts:
            self._host_experts.begin_step()
        if self._host_cache and batch.swaps:
            self._host_cache.move(batch.swaps, batch.copies)
        else:
            self._caches.copy(batch.copies)
        choices = NO_CHOICES if self._membership.rank else Choices.of(batch)
        if not choices.slots:
            step = CudaStep(self, batch, choices, SamplingRows.greedy(0))
            step.download = Download({}, self._device)
            return step
        rows = self._slots.sampling_rows(choices)
        self._slots.count_expected_tokens(choices)
        step = CudaStep(self, batch, choices, rows)
        if not batch.has_mask:
            step.choose()
        return step

    def close(self) -> None:
        if self.vision:
            self.vision.close()
        self._graphs.clear()
        self._caches.clear()
        if self._host_experts:
            self._host_experts.close()
        del self._program, self._adapted, self._adapters, self._host_cache, self._host_experts, self.vision
        if self._membership.num_ranks > 1:  # otherwise the group belongs to another model in this process
            group.leave()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # releases the memory for other processes

    def _run_alone(self, batch: Batch, wait: Callable[[CudaStep], object]) -> None:
        step = self.launch(batch)
        if batch.has_mask and not self._membership.rank:
            step.mask(np.full((len(batch.rows), -(-self._vocab_size // 32)), 0xFFFFFFFF, np.uint32))
        wait(step)

    def _fresh_lengths(self) -> list[int]:
        """Return the lengths of new prompts for which cuDNN prepares a plan."""
        [cache, *_] = self._caches.tensors.values()
        if self._is_invariant or not prefill_attention.are_taken(self._program.params[TABLE].dtype, cache):
            return []
        return list(range(prefill_attention.SHORTEST, self._max_tokens + 1, prefill_attention.STEP))

    def _count_experts(self, num_ranks: int) -> ExpertUsage | None:
        """Let steps count the choices of experts, on the first rank, and on others for their experts on the host.
        `num_ranks`: that have different experts."""
        routed, rank = routed_layers(self._program.graph), self._membership.rank
        if not routed or (rank and not self._host_experts):
            return None
        counter = DeviceCounter(len(routed), routed[0].num_experts, self._device)
        for program in {self._program, self._adapted}:
            program.count_in(counter.counts)
        if self._host_experts:
            first = experts_of_rank(routed[0].num_experts, rank % num_ranks, num_ranks).start
            self._host_experts.observe(counter.counts[:, first:])
        return ExpertUsage(routed, counter, num_ranks, self._membership.expert_orders)

    def _check_type(self) -> None:
        if self._membership.num_ranks > 1 and self._program.params[TABLE].dtype == torch.float16:
            raise ConfigError(
                f"MP_NUM is {self._membership.num_ranks}, with float16 it must be 1: export with DTYPE=bfloat16"
            )

    # Methods that `CudaStep` calls

    def launch_model(self, batch: Batch, choices: Choices, fields: Arrays) -> LaunchedModel:
        """Launch the graph. `fields` are further arrays that the step needs on the device."""
        inputs = self._slots.graph_inputs(batch)
        _mark_pending(batch, inputs)
        if self.expert_usage:
            inputs[NUM_TOKENS], inputs[NUM_LOGITS] = (
                np.array([len(inputs[name])], np.int32) for name in ("token_ids", "logit_rows")
            )
        num_logits, shape = len(inputs["logit_rows"]), self._graphs.shape_for(inputs)
        groups = {}
        if self._adapters and self._slots.adapters:
            sizes = (shape.num_tokens, shape.num_logits) if shape else (len(inputs["token_ids"]), num_logits)
            groups = self._adapters.groups(self._slots.adapters, batch, inputs, sizes)
        more = {**groups, **fields, "slots": np.array(choices.slots, np.int64)}
        if self._kept_states:
            more[KEPT_ROWS] = self.kept_rows = self._kept_states.rows_of(batch.rows)
        if shape:
            captured = self._graphs.replay(inputs | more, shape)
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
        return LaunchedModel(self._compute({**sent, **known}), sent, None)

    def prompt_outputs(self, batch: Batch) -> StepPromptOutputs | None:
        """Return the prompt outputs that this rank has to compute for the batch, or None."""
        is_sampling = batch.has_prompt_outputs and not self._membership.rank
        return StepPromptOutputs(self._slots.pooled_states.specs(batch)) if is_sampling else None

    def choose(self, logits: Tensor, rows: SamplingRows, launched: LaunchedModel) -> Download:
        """Start sampling and the download of its results. `logits` is [num_choices, V]; `rows` are the sampling rows on
        the host."""
        mode = SamplingMode.of(rows)
        if launched.captured:
            return Download({"token_ids": self._graphs.choose(launched.captured, mode, len(logits))}, self._device)
        masks = {} if rows.mask is None else self._uploads.send({"mask": rows.mask})
        sampled = self._choose(logits, {**launched.sent, **masks}, mode, int(rows.num_logprobs.max()))
        return Download.of(sampled, self._device)

    def accept(self, batch: Batch, choices: Choices, rows: SamplingRows, sampled: SampledRows) -> StepOutput:
        return self._slots.accept(batch, choices, rows, sampled)

    def _choose(
        self, logits: Tensor, sent: Mapping[str, Tensor], mode: SamplingMode, num_logprobs: int = -1
    ) -> dict[str, Tensor]:
        sampled = sample(logits, sent, mode, num_logprobs)
        token_ids = sampled["token_ids"]
        self._last_tokens.index_copy_(0, sent["slots"], token_ids)
        if len(token_ids) <= len(self.chosen_tokens):
            self.chosen_tokens[: len(token_ids)].copy_(token_ids)
        return sampled

    def _compute(self, inputs: Inputs) -> Outputs:
        token_ids = cuda.broadcast(cuda.last_tokens_in(inputs["token_ids"], self._last_tokens))
        program = self._adapted if GROUPS in inputs else self._program
        outputs = program(
            {SPAN_EMBEDDINGS: self._no_embeddings, **inputs, **self._caches.tensors, "token_ids": token_ids}
        )
        if self._kept_states:
            assert outputs.states is not None, "the graph has no hidden states"
            self._kept_states.memory.index_copy_(0, inputs[KEPT_ROWS], outputs.states)
        return outputs


class CudaStep:
    """Launched step. Its tokens are sampled once its mask has arrived, if it needs one."""

    def __init__(self, executor: CudaExecutor, batch: Batch, choices: Choices, rows: SamplingRows):
        self._executor, self._batch, self._choices, self._rows = executor, batch, choices, rows
        self._prompt_outputs = executor.prompt_outputs(batch)
        fields = self._prompt_outputs.fields_to_send() if self._prompt_outputs else {}
        self._launched = executor.launch_model(batch, choices, fields | (fields_to_send(rows) if choices.slots else {}))
        outputs, sent, _ = self._launched
        if self._prompt_outputs:
            self._prompt_outputs.begin(outputs, sent)
        wanted = slice(len(choices.slots)) if choices.logit_rows is None else choices.logit_rows
        self._logits = outputs.logits[wanted]
        self.download: Download | None = None

    def drafts(self) -> Mapping[int, Sequence[int]]:
        return {}

    def mask(self, bits: np.ndarray) -> None:
        self._rows.mask = bits
        self.choose()

    def choose(self) -> None:
        self.download = self._executor.choose(self._logits, self._rows, self._launched)

    def result(self) -> StepOutput:
        assert self.download, "the step waits for its mask"
        arrays, output = self.download.wait(), StepOutput([], [])
        if arrays:
            sampled = SampledRows.empty(len(self._logits), 0)
            for name, array in arrays.items():
                setattr(sampled, name, array)
            output = self._executor.accept(self._batch, self._choices, self._rows, sampled)
        return output._replace(prompt_outputs=self._prompt_outputs.result()) if self._prompt_outputs else output


def _device(kind: str, membership: Membership) -> torch.device:
    """Return the device of the rank: the GPU that has the number of its place on this host. It becomes the current
    device."""
    if (kind or "cuda") != "cuda" or not torch.cuda.is_available():
        return torch.device(kind or "cpu")
    device = torch.device("cuda", membership.rank % membership.ranks_per_host)
    torch.cuda.set_device(device)
    return device


def _mark_pending(batch: Batch, inputs: dict[str, np.ndarray]) -> None:
    """Replace each PENDING token by -2 - slot, which stands for the slot's last sampled token
    (`cuda.last_tokens_in`)."""
    is_pending = inputs["token_ids"] == PENDING
    if is_pending.any():
        slots = np.array([row.slot for row in batch.rows], np.int32)
        slot_of_token = np.repeat(slots, np.diff(inputs["query_starts"]))
        inputs["token_ids"] = np.where(is_pending, -2 - slot_of_token, inputs["token_ids"])
