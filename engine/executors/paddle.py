"""Runs an exported graph with Paddle Inference and our CPU ops."""

from __future__ import annotations

import logging
from pathlib import Path

import paddle
import paddle.inference

from engine.core.types import Batch, Chunk, Request, Sampling, StepOutput
from engine.executors.cpus import num_cpus
from engine.executors.memory import free_memory_bytes, keep_freed_memory, num_blocks
from engine.executors.step_inputs import graph_inputs, sampling_rows, step_output
from engine.exporting.manifest import Graph, Manifest, rank_dir
from engine.models.kv_cache import CacheSpec
from engine.ops import cpu
from engine.ops.cpu.paddle_ops import register_paddle_ops
from engine.settings.config import Config

log = logging.getLogger(__name__)


class PaddleExecutor:
    """Rank 0 of `graph_dir` on the CPU. The KV cache is allocated at construction, after a profiling step."""

    def __init__(self, graph_dir: Path, config: Config):
        cpu.load()  # before anything else: CPU_ISA may be wrong
        model = Manifest.read(graph_dir)
        graph = model.graph()
        cpu.set_num_threads(config.cpu_threads or num_cpus())
        register_paddle_ops()
        self._config = config
        self._model_len = model.max_seq_len
        self._predictor = _load(rank_dir(graph_dir), graph)
        self._caches = _CacheInputs(graph.caches, self._predictor)
        self.block_size = model.block_size
        outputs = dict(zip(graph.outputs, self._predictor.get_output_names(), strict=True))
        self._logits = self._predictor.get_output_handle(outputs["logits"])
        self._inputs = {name: self._predictor.get_input_handle(name) for name in graph.inputs}
        keep_freed_memory()
        self.num_blocks = self._profile()
        self._caches.allocate(self.num_blocks)
        log.info("graph loaded, %d threads, %s", cpu.num_threads(), cpu.cpu_isa())

    def warm_up(self) -> None:
        """The longest step once."""
        self._run_longest_step(self.num_blocks)

    def step(self, batch: Batch) -> StepOutput:
        for name, array in graph_inputs(batch).items():
            self._inputs[name].reshape(array.shape)
            self._inputs[name].copy_from_cpu(array)
        self._predictor.run()
        requests = [chunk.request for chunk in batch.chunks if chunk.samples]
        if not requests:
            return StepOutput([], [])
        logits = self._logits.copy_to_cpu()
        return step_output(cpu.sample(logits, sampling_rows(requests)), requests)

    def close(self) -> None:
        del self._predictor, self._inputs, self._logits, self._caches

    def _profile(self) -> int:
        """Runs the longest step on a small cache, then counts the blocks that the memory left over holds."""
        num_tokens = min(self._config.max_step_tokens, self._model_len)
        self._caches.allocate(-(-num_tokens // self.block_size))
        self._run_longest_step(self._caches.num_blocks)
        free = free_memory_bytes()
        return num_blocks(self._config, self._model_len, self.block_size, self._caches.block_bytes, free)

    def _run_longest_step(self, blocks: int) -> None:
        num_tokens = min(self._config.max_step_tokens, self._model_len, blocks * self.block_size)
        request = Request("warm-up", [0] * num_tokens, num_tokens, Sampling(max_new_tokens=1))
        request.block_ids = list(range(-(-num_tokens // self.block_size)))
        self.step(Batch([Chunk(request, 0, num_tokens)]))


class _CacheInputs:
    """The KV caches of all layers, shared with the predictor."""

    def __init__(self, specs: tuple[CacheSpec, ...], predictor: paddle.inference.Predictor):
        self._specs = specs
        self._handles = [predictor.get_input_handle(spec.name) for spec in specs]
        self._tensors: list[paddle.Tensor] = []
        self.block_bytes = sum(spec.block_bytes for spec in specs)
        self.num_blocks = 0

    def allocate(self, blocks: int) -> None:
        # Not filled: pages that no request has touched cost no memory.
        self._tensors = [paddle.empty(spec.shape_of(blocks), spec.dtype) for spec in self._specs]
        for handle, tensor in zip(self._handles, self._tensors, strict=True):
            handle.share_external_data(tensor)
        self.num_blocks = blocks


def _load(directory: Path, graph: Graph) -> paddle.inference.Predictor:
    config = paddle.inference.Config(str(directory / graph.program), str(directory / graph.parameters))
    config.disable_gpu()
    config.switch_ir_optim(False)  # the graph is made of fused ops already
    config.disable_glog_info()
    return paddle.inference.create_predictor(config)
