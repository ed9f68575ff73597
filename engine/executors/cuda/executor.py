"""Executor on one GPU: uploads the inputs of a step in one copy, runs the graph and samples on the device.

`launch` returns before any of that has completed. The sampled token also stays on the device, where the next step reads
it, so that step can be launched before the host knows the token (`Row.token_ids` is then PENDING).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from engine.core.types import Batch
from engine.errors import ConfigError
from engine.executors.block_access import BlockAccess
from engine.executors.cuda.blocks import CudaBlocks
from engine.executors.cuda.compilation import KernelCompiler, warn_of_late_compilation
from engine.executors.cuda.draft_graph import CudaDraftGraph
from engine.executors.cuda.host_cache import HostCache
from engine.executors.cuda.model_runner import ModelRunner
from engine.executors.cuda.step import CudaStep
from engine.executors.cuda.vision_encoder import CudaVisionEncoder
from engine.executors.cuda.warm_up import StepLimits, warm_up_batches
from engine.executors.image_inputs import ImageInputs
from engine.executors.nixl_blocks import with_nixl
from engine.executors.prompt_outputs import LOGITS_BYTES, max_prompt_logits
from engine.exporting.manifest import Manifest
from engine.log import Report
from engine.models.vision import VISION_GRAPH
from engine.ops.cpu.group import Membership
from engine.ops.cuda import group
from engine.settings.config import Config

log = logging.getLogger(__name__)


class CudaExecutor:
    """Executor of one rank of the model, on the GPU with its number. Owns the model runner, the blocks on the host and
    the vision encoder, and the memory of the device.

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
        model = self._model = Manifest.read(graph_dir)
        self._config, self._membership = config, membership or Membership.alone()
        self.device = _device(device, self._membership)
        self._compiler = KernelCompiler(self.device, report) if self.device.type == "cuda" else None
        self.runner = ModelRunner(graph_dir, config, self.device, self._membership)
        self._host_cache = HostCache(self.runner.caches, config, self.device) if config.swap_space else None
        self.vision: CudaVisionEncoder | None = None
        if self.runner.samples and config.enable_mm and VISION_GRAPH in model.graphs:
            tower = self.runner.load_graph(VISION_GRAPH)
            self.vision = CudaVisionEncoder(tower, ImageInputs(graph_dir), self.device, self.runner.dtype)
        self.block_size, self.block_bytes = model.block_size, self.runner.caches.block_bytes
        self.cache_groups, self.takes_spans = model.graph().cache_groups, self.runner.takes_spans
        self.expert_usage = self.runner.expert_usage
        self.max_prompt_logits = max_prompt_logits(model.vocab_size)

    def load_draft_graph(self, name: str) -> CudaDraftGraph:
        """Load the graph `name` of the model, which drafts for it."""
        return CudaDraftGraph.of_layer(name, self.runner, self._config)

    def free_bytes(self) -> int:
        """Return the bytes of the device that GPU_MEMORY_UTILIZATION leaves for the cache, after everything else that
        was needed so far."""
        if self.device.type != "cuda":
            return 1 << 30
        free, total = torch.cuda.mem_get_info(self.device)
        foreign = total - free - torch.cuda.memory_reserved(self.device)  # context, captured graphs, others
        own = torch.cuda.max_memory_allocated(self.device) - self.runner.caches.num_bytes
        own += self.vision.num_bytes if self.vision else 0
        own += 2 * 4 * self._config.batch_size * self._model.vocab_size + LOGITS_BYTES  # of steps, and of prompts
        return max(0, int(total * self._config.gpu_memory_utilization) - foreign - own)

    def allocate(self, num_blocks: int) -> None:
        group.join(self._membership, self.device)  # only now are all ranks known to have loaded
        try:
            self.runner.allocate(num_blocks, self._compiler)
        except torch.cuda.OutOfMemoryError:
            free, total = (number / 2**30 for number in torch.cuda.mem_get_info(self.device))
            raise ConfigError(
                f"{num_blocks} KV blocks ({num_blocks * self.block_bytes / 2**30:.1f} GiB) and the CUDA graphs do not"
                f" fit into the {total:.1f} GiB of the GPU, {free:.1f} GiB are left: lower GPU_MEMORY_UTILIZATION or"
                " NUM_GPU_BLOCKS_OVERRIDE, or list fewer CUDAGRAPH_CAPTURE_SIZES"
            ) from None

    def warm_up(self) -> None:
        if not self._compiler:
            return
        limits = StepLimits(
            max_tokens=min(self._config.max_step_tokens, self._model.max_seq_len),
            max_context=self.runner.caches.null_block * self.block_size,
            max_requests=self._config.batch_size,
            block_size=self.block_size,
            max_prompt_logits=self.max_prompt_logits,
            num_groups=len(self.cache_groups),
        )
        started, fresh_lengths = time.monotonic(), self.runner.fresh_lengths(limits.max_tokens)
        self._compiler.compile_missing(
            lambda: self._run_all(limits, fresh_lengths[:1], lambda step: torch.cuda.synchronize(self.device))
        )
        self._run_all(limits, fresh_lengths, CudaStep.result)
        if self.vision:
            self.vision.warm_up()
        torch.cuda.reset_peak_memory_stats(self.device)
        warn_of_late_compilation()
        log.info("steps of every kind ran in %.1f s", time.monotonic() - started)

    def load_adapter(self, adapter: tuple[str, ...]) -> None:
        assert self.runner.adapters, "no setting says that there may be adapters"
        self.runner.adapters.load(adapter)

    def drop_adapter(self, adapter_id: str) -> None:
        if self.runner.adapters:
            self.runner.adapters.drop(adapter_id)

    def blocks(self) -> BlockAccess:
        """Return the access to the blocks that are allocated now."""
        return with_nixl(CudaBlocks(self.runner.caches, self.device), self._config)

    def launch(self, batch: Batch) -> CudaStep:
        runner = self.runner
        runner.slots.place(batch)
        if runner.host_experts:
            runner.host_experts.begin_step()
        if self._host_cache and batch.swaps:
            self._host_cache.move(batch.swaps, batch.copies)
        else:
            runner.caches.copy(batch.copies)
        return CudaStep(runner, batch)

    def close(self) -> None:
        if self.vision:
            self.vision.close()
        self.runner.close()
        del self._host_cache, self.vision
        if self._membership.num_ranks > 1:  # otherwise the group belongs to another model in this process
            group.leave()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # releases the memory for other processes

    def _run_all(self, limits: StepLimits, fresh_lengths: list[int], wait: Callable[[CudaStep], object]) -> None:
        """Run one step of every kind after the other."""
        for batch in warm_up_batches(limits, fresh_lengths):
            step = self.launch(batch)
            if batch.has_mask and self.runner.samples:
                step.mask(np.full((len(batch.rows), -(-self._model.vocab_size // 32)), 0xFFFFFFFF, np.uint32))
            wait(step)


def _device(kind: str, membership: Membership) -> torch.device:
    """Return the device of the rank: the GPU that has the number of its place on this host. It becomes the current
    device."""
    if (kind or "cuda") != "cuda" or not torch.cuda.is_available():
        return torch.device(kind or "cpu")
    device = torch.device("cuda", membership.rank % membership.ranks_per_host)
    torch.cuda.set_device(device)
    return device
