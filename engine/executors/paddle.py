"""Runs an exported graph with Paddle Inference and our CPU ops."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import paddle
import paddle.inference

from engine.core.types import Batch, Copy, StepOutput
from engine.dtypes import held_as
from engine.executors.cpus import num_cpus
from engine.executors.memory import free_memory_bytes, keep_freed_memory
from engine.executors.slots import Slots
from engine.executors.step import Mask, StepInThread
from engine.exporting.exported import PARAMETERS, PROGRAM, ExportedModel, rank_dir
from engine.graph import read_graph
from engine.ops import cpu
from engine.ops.cpu.paddle_ops import register_paddle_ops
from engine.settings.config import Config

log = logging.getLogger(__name__)


class PaddleExecutor:
    """Rank 0 of `graph_dir` on the CPU. Steps run in a thread of their own, so that tokens are sent and requests are
    read meanwhile."""

    def __init__(self, graph_dir: Path, config: Config):
        cpu.load()  # before anything else: CPU_ISA may be wrong
        model = ExportedModel.read(graph_dir)
        cpu.set_num_threads(config.cpu_threads or num_cpus())
        register_paddle_ops()
        self._predictor = _load(rank_dir(graph_dir))
        self._caches = _CacheInputs.of(rank_dir(graph_dir) / PROGRAM, self._predictor)
        self.block_size, self.block_bytes = self._caches.block_size, self._caches.block_bytes
        self._slots = Slots(config.batch_size, -(-model.max_seq_len // self.block_size), self.block_size)
        self._logits = self._predictor.get_output_handle(self._predictor.get_output_names()[0])
        self._inputs = {name: self._predictor.get_input_handle(name) for name in self._predictor.get_input_names()}
        self._thread = ThreadPoolExecutor(1, "step")
        keep_freed_memory()
        log.info("graph loaded, %d threads, %s", cpu.num_threads(), cpu.cpu_isa())

    def free_bytes(self) -> int:
        return free_memory_bytes()

    def allocate(self, num_blocks: int) -> None:
        self._caches.allocate(num_blocks)

    def launch(self, batch: Batch) -> StepInThread:
        return StepInThread(self._thread, batch, self._compute)

    def close(self) -> None:
        self._thread.shutdown()
        del self._predictor, self._inputs, self._logits, self._caches

    def _compute(self, batch: Batch, wait_for_mask: Callable[[], Mask]) -> StepOutput:
        self._slots.place(batch)
        for copy in batch.copies:
            self._caches.copy(copy)
        for name, array in self._slots.graph_inputs(batch).items():
            self._inputs[name].reshape(array.shape)
            self._inputs[name].copy_from_cpu(array)
        self._predictor.run()
        if not any(row.num_sampled for row in batch.rows):
            return StepOutput([], [])
        return self._slots.sample(batch, self._logits.copy_to_cpu(), wait_for_mask(), cpu.sample)


class _CacheInputs:
    """The KV caches of all layers: [num_blocks, 2, kv heads, block_size, head_dim] each, shared with the predictor."""

    def __init__(self, handles: dict[str, paddle.inference.Tensor], shape: tuple[int, ...], dtype: str):
        self._handles = handles
        self._shape = shape  # of one block
        self._dtype = dtype
        self._tensors: list[paddle.Tensor] = []
        self.block_size = shape[2]

    @classmethod
    def of(cls, program: Path, predictor: paddle.inference.Predictor) -> _CacheInputs:
        inputs = read_graph(program).inputs
        names = [name for name in inputs if name.startswith("kv_cache_")]
        first = inputs[names[0]]
        return cls({name: predictor.get_input_handle(name) for name in names}, first.shape[1:], first.dtype)

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        return len(self._handles) * int(np.prod(self._shape)) * held_as(self._dtype).itemsize

    def allocate(self, num_blocks: int) -> None:
        self._tensors.clear()
        # Not filled: pages that no request has touched cost no memory.
        self._tensors = [paddle.empty([num_blocks, *self._shape], self._dtype) for _ in self._handles]
        for handle, tensor in zip(self._handles.values(), self._tensors, strict=True):
            handle.share_external_data(tensor)

    def copy(self, copy: Copy) -> None:
        num_bytes = self.block_bytes // len(self._handles)
        for tensor in self._tensors:
            start = tensor.data_ptr()
            ctypes.memmove(start + copy.target * num_bytes, start + copy.source * num_bytes, num_bytes)


def _load(directory: Path) -> paddle.inference.Predictor:
    config = paddle.inference.Config(str(directory / PROGRAM), str(directory / PARAMETERS))
    config.disable_gpu()
    config.switch_ir_optim(False)  # the graph is made of fused ops already
    config.disable_glog_info()
    return paddle.inference.create_predictor(config)
