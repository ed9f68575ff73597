"""Runs an exported graph with Paddle Inference and our CPU ops."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paddle
import paddle.inference
from paddle.base import libpaddle

from engine.core.types import Batch, Copy, StepOutput
from engine.executors.cpus import num_cpus
from engine.executors.memory import free_memory_bytes, keep_freed_memory
from engine.executors.slots import Slots
from engine.executors.step import Mask, StepInThread
from engine.exporting.manifest import Graph, Manifest, rank_dir
from engine.models.kv_cache import BLOCK, CacheSpec
from engine.ops import cpu
from engine.ops.cpu import group
from engine.ops.cpu.group import Membership
from engine.ops.cpu.paddle_ops import register_paddle_ops
from engine.settings.config import Config

log = logging.getLogger(__name__)


class PaddleExecutor:
    """One rank of `graph_dir` on the CPU. Steps run in a thread of their own, so that tokens are sent and requests are
    read meanwhile. The first rank alone chooses tokens."""

    runs_ahead = False

    def __init__(self, graph_dir: Path, config: Config, membership: Membership | None = None):
        cpu.load()  # before anything else: CPU_ISA may be wrong
        model = Manifest.read(graph_dir)
        graph = model.graph()
        membership = membership or Membership.alone()
        self._is_first = membership.rank == 0
        self._num_sharing = membership.ranks_per_host
        cpu.set_num_threads(config.cpu_threads or max(1, num_cpus() // self._num_sharing))
        register_paddle_ops()
        if membership.num_ranks > 1:
            group.join(membership)
        self._predictor = _load(rank_dir(graph_dir, membership.rank), graph)
        self._run = _run_unlocked(self._predictor)
        self._caches = _CacheInputs(graph.caches, self._predictor)
        self.block_size, self.block_bytes = model.block_size, self._caches.block_bytes
        self._slots = Slots(
            config.batch_size, -(-model.max_seq_len // self.block_size), self.block_size, model.vocab_size
        )
        outputs = dict(zip(graph.outputs, self._predictor.get_output_names(), strict=True))
        self._logits = self._predictor.get_output_handle(outputs["logits"])
        self._inputs = {name: self._predictor.get_input_handle(name) for name in graph.inputs}
        self._thread = ThreadPoolExecutor(1, "step")
        keep_freed_memory()
        log.info("graph loaded, %d threads, %s", cpu.num_threads(), cpu.cpu_isa())

    def free_bytes(self) -> int:
        return free_memory_bytes() // self._num_sharing

    def allocate(self, num_blocks: int) -> None:
        self._caches.allocate(num_blocks)

    def launch(self, batch: Batch) -> StepInThread:
        return StepInThread(self._thread, batch, self._compute)

    def close(self) -> None:
        self._thread.shutdown()
        del self._run, self._predictor, self._inputs, self._logits, self._caches

    def _compute(self, batch: Batch, wait_for_mask: Callable[[], Mask]) -> StepOutput:
        self._slots.place(batch)
        for copy in batch.copies:
            self._caches.copy(copy)
        for name, array in self._slots.graph_inputs(batch).items():
            self._inputs[name].reshape(array.shape)
            self._inputs[name].copy_from_cpu(array)
        self._run()
        if not self._is_first or not any(row.num_sampled for row in batch.rows):
            return StepOutput([], [])
        return self._slots.sample(batch, self._logits.copy_to_cpu(), wait_for_mask(), cpu.sample)


class _CacheInputs:
    """The KV caches of all layers, shared with the predictor."""

    def __init__(self, specs: tuple[CacheSpec, ...], predictor: paddle.inference.Predictor):
        assert all(spec.axes[0] == BLOCK for spec in specs), "a block must lie in one piece to be copied"
        self._specs = specs
        self._handles = [predictor.get_input_handle(spec.name) for spec in specs]
        self._tensors: list[paddle.Tensor] = []
        self.block_bytes = sum(spec.block_bytes for spec in specs)

    def allocate(self, num_blocks: int) -> None:
        self._tensors.clear()
        # Not filled: pages that no request has touched cost no memory.
        self._tensors = [
            paddle.empty(spec.shape_of(num_blocks), spec.dtype)  # type: ignore[arg-type]
            for spec in self._specs
        ]
        for handle, tensor in zip(self._handles, self._tensors, strict=True):
            handle.share_external_data(tensor)

    def copy(self, copy: Copy) -> None:
        for spec, tensor in zip(self._specs, self._tensors, strict=True):
            start, size = tensor.data_ptr(), spec.block_bytes
            ctypes.memmove(start + copy.target * size, start + copy.source * size, size)


def _load(directory: Path, graph: Graph) -> paddle.inference.Predictor:
    config = paddle.inference.Config(str(directory / graph.program), str(directory / graph.parameters))
    config.disable_gpu()
    config.switch_ir_optim(False)  # the graph is made of fused ops already
    config.disable_glog_info()
    return paddle.inference.create_predictor(config)


def _run_unlocked(predictor: paddle.inference.Predictor) -> Callable[[], None]:
    """`predictor.run` without Python's lock, which Paddle's own keeps for the whole step: meanwhile no token would be
    sent, no request read and no ping answered. An error of the graph ends the process."""
    run = ctypes.CDLL(libpaddle.__file__)["_ZN12paddle_infer9Predictor3RunEv"]  # paddle_infer::Predictor::Run()
    run.argtypes = [ctypes.c_void_p]
    predictor_pointer = ctypes.c_void_p.from_address(id(predictor) + object.__basicsize__).value  # pybind11's layout

    def call() -> None:
        run(predictor_pointer)

    return call
