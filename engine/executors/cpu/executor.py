"""Executor of one rank of an exported graph on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from engine import graph
from engine.core.types import Batch, Copy, StepOutput
from engine.executors.block_access import BlockAccess
from engine.executors.cpu.adapters import CpuAdapters
from engine.executors.cpu.blocks import CpuBlocks
from engine.executors.cpu.draft_graph import CpuDraftGraph
from engine.executors.cpu.program import CpuProgram, allocated
from engine.executors.cpu.vision_encoder import CpuVisionEncoder
from engine.executors.cpus import num_cpus
from engine.executors.expert_placement import reorder_experts
from engine.executors.expert_usage import ExpertUsage
from engine.executors.memory import free_memory_bytes
from engine.executors.nixl_blocks import with_nixl
from engine.executors.prompt_outputs import max_prompt_logits
from engine.executors.slots import Slots
from engine.executors.spans import SlotSpans
from engine.executors.step import Mask, StepInThread
from engine.exporting.manifest import Manifest
from engine.models.kv_cache import BLOCK
from engine.models.layers import HIDDEN, LOGITS, STATES
from engine.models.vision import VISION_GRAPH
from engine.ops import cpu
from engine.ops.cpu import group
from engine.ops.cpu.group import Membership
from engine.settings.config import Config

log = logging.getLogger(__name__)


class CpuExecutor:
    """Executor of one rank on the CPU. Owns the program, the KV caches, the slots and the loaded adapters.

    Steps run in a separate thread, so that tokens are sent and requests are read meanwhile. Only the first rank samples
    tokens.
    """

    max_drafts = 0
    draft_counts = None
    runs_ahead = False

    def __init__(self, graph_dir: Path, config: Config, membership: Membership | None = None):
        cpu.load()  # first, because it checks CPU_ISA
        model = Manifest.read(graph_dir)
        membership = membership or Membership.alone()
        self._config, self._is_first = config, membership.rank == 0
        self._num_sharing = membership.ranks_per_host * config.data_parallel_size
        cpu.set_num_threads(config.cpu_threads or max(1, num_cpus() // self._num_sharing))
        self._has_group = membership.num_ranks > 1
        if self._has_group:
            group.join(membership)
        self._specs = model.graph().caches
        assert all(spec.axes[0] == BLOCK for spec in self._specs), "a block must lie in one piece to be copied"
        self.block_size, self.block_bytes = model.block_size, sum(spec.block_bytes for spec in self._specs)
        self.graph_dir, self._files = graph_dir, (graph_dir, membership.rank)
        loaded, params = graph.load(*self._files)
        orders = membership.expert_orders
        self._program = CpuProgram(loaded, reorder_experts(loaded, params, orders, graph_dir))
        self.expert_usage: ExpertUsage | None = None
        if self._is_first and (layers := self._program.routed):
            num_ranks = model.num_ranks if model.expert_parallel else 1
            self.expert_usage = ExpertUsage(layers, self._program.count_experts(), num_ranks, orders)
        self._adapters = CpuAdapters(graph_dir, loaded, (membership.rank, membership.num_ranks), config)
        self._caches: dict[str, np.ndarray] = {}
        self.max_prompt_logits = max_prompt_logits(model.vocab_size)
        self.cache_groups = model.graph().cache_groups
        spans = SlotSpans.of(loaded, config.batch_size)
        self.takes_spans = spans is not None
        max_blocks = -(-model.max_seq_len // self.block_size)
        self._slots = Slots(config.batch_size, max_blocks, self.block_size, model.vocab_size, self.cache_groups, spans)
        self.states: np.ndarray | None = None  # f32 [tokens, H] of the last step, until the next, if the graph has them
        self.num_steps = 0  # steps that have ended
        self.thread = ThreadPoolExecutor(1, "step")  # speculative decoding drafts in it, too
        has_tower = self._is_first and config.enable_mm and VISION_GRAPH in model.graphs
        self.vision = CpuVisionEncoder(graph_dir, membership.rank, self.thread) if has_tower else None
        log.info("graph loaded, %d threads, %s", cpu.num_threads(), cpu.cpu_isa())

    def load_graph(self, name: str) -> CpuProgram:
        """Load another graph of the model, which shares parameters of the same name with this one. Raises ModelError
        that lists the graphs there are."""
        return CpuProgram(*graph.load(*self._files, name), self._program)

    def load_draft_graph(self, name: str) -> CpuDraftGraph:
        """Load the graph of the model that drafts for it, as `load_graph` does, with its caches."""
        return CpuDraftGraph(self.load_graph(name), Manifest.read(self.graph_dir).graph(name).caches)

    def free_bytes(self) -> int:
        of_images = self.vision.reserved_bytes if self.vision else 0
        return max(0, free_memory_bytes() // self._num_sharing - self._adapters.reserved_bytes - of_images)

    def allocate(self, num_blocks: int) -> None:
        self._caches.clear()
        self._program.set_caches({})  # otherwise the old caches would stay alive beside the new ones
        self._caches = {spec.name: allocated(spec.shape_of(num_blocks), spec.dtype) for spec in self._specs}
        self._program.set_caches(self._caches)

    def warm_up(self) -> None:
        """Do nothing: all kernels are compiled when the server is installed."""

    def load_adapter(self, adapter: tuple[str, ...]) -> None:
        loaded = self._adapters.read(adapter)
        self.thread.submit(self._adapters.loaded.__setitem__, adapter[0], loaded)

    def drop_adapter(self, adapter_id: str) -> None:
        self.thread.submit(self._adapters.loaded.pop, adapter_id, None)  # after the steps that were launched

    def blocks(self) -> BlockAccess:
        """Return the access to the blocks that are allocated now."""
        return with_nixl(CpuBlocks(self, list(self._caches.values())), self._config)

    def launch(self, batch: Batch) -> StepInThread:
        return StepInThread(self.thread, batch, self.compute)

    def close(self) -> None:
        self.thread.shutdown()
        del self._program, self._caches, self._adapters
        if self._has_group:  # otherwise the group belongs to another model in this process
            group.leave()

    def compute(self, batch: Batch, wait_for_mask: Callable[[], Mask]) -> StepOutput:
        """Compute a step. Must be called in `thread`. `wait_for_mask` is called if the batch has one."""
        try:
            return self._compute(batch, wait_for_mask)
        finally:
            self.num_steps += 1

    def _compute(self, batch: Batch, wait_for_mask: Callable[[], Mask]) -> StepOutput:
        self._slots.place(batch)
        for copy in batch.copies:
            self._copy(copy)
        inputs = self._slots.graph_inputs(batch)
        groups = self._adapters.groups(self._slots.adapters, batch, inputs) if self._slots.adapters else None
        outputs = self._program.run(inputs, groups and groups.array)
        self.states = outputs.get(STATES)
        if not self._is_first or not (batch.has_prompt_outputs or any(row.num_sampled for row in batch.rows)):
            return StepOutput([], [])
        logits = outputs[LOGITS]
        output = self._slots.sample(batch, logits, wait_for_mask(), cpu.sample)
        if not batch.has_prompt_outputs:
            return output
        return output._replace(
            prompt_outputs=self._slots.pooled_states.compute(batch, logits, outputs[HIDDEN], cpu.sample)
        )

    def _copy(self, copy: Copy) -> None:
        for cache in self._caches.values():
            cache[copy.target] = cache[copy.source]
