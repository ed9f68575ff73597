"""Builds the network of one rank from a checkpoint and has Paddle save it: the part of the export that needs Paddle."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase

from engine.exporting.exported import STEM
from engine.models.checkpoint import Checkpoint
from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder, input_specs
from engine.models.weights import list_weights
from engine.ops import build
from engine.ops.cpu.paddle_ops import register_paddle_ops

REPORT_EVERY_S = 2.0


@dataclass(frozen=True)
class Shard:
    """One rank's part of the exported model."""

    config: DecoderConfig
    dtype: str  # of matrices and KV cache: float32 or bfloat16
    block_size: int
    rank: int = 0
    num_ranks: int = 1


class ParameterLoader:
    """Makes each parameter when the network asks for it, so that beside the network one tensor is in memory."""

    def __init__(self, checkpoint: Checkpoint, shard: Shard, progress: Callable[[str], None]):
        self._checkpoint = checkpoint
        self._shard = shard
        self._progress = progress
        self._weights = {w.name: w for w in list_weights(shard.config, shard.rank, shard.num_ranks)}
        self._num_loaded = 0
        self._reported = time.monotonic()

    def __call__(self, name: str) -> EagerParamBase | None:
        if name == "inv_freq":
            return _parameter(name, self._shard.config.rope.inv_freq)
        weight = self._weights.get(name)
        if weight is None:
            return None
        shard = self._shard
        array = self._checkpoint.read(weight, shard.dtype, shard.rank, shard.num_ranks)
        self._num_loaded += 1
        if time.monotonic() > self._reported + REPORT_EVERY_S:
            self._reported = time.monotonic()
            self._progress(f"load weights, {self._num_loaded} of {len(self._weights)} tensors")
        return _parameter(name, array)


def save_rank(directory: Path, checkpoint: Checkpoint, shard: Shard, progress: Callable[[str], None]) -> None:
    """Writes the graph and its parameters into `directory`."""
    paddle.set_device("cpu")
    build.library(build.PADDLE_OPS, report=progress)
    register_paddle_ops()
    progress(f"load weights as {shard.dtype}")
    network = Decoder(shard.config, ParameterLoader(checkpoint, shard, progress), shard.num_ranks)
    checkpoint.refuse_unread(ignored={"lm_head.weight"} if shard.config.tied_embeddings else set())
    network.eval()
    progress("trace and save the graph")
    specs = input_specs(shard.config, shard.dtype, shard.block_size, shard.num_ranks)
    paddle.jit.save(network, str(directory / STEM), input_spec=specs)


def _parameter(name: str, array: np.ndarray) -> EagerParamBase:
    tensor = paddle.to_tensor(array, place=paddle.CPUPlace())  # uint16 becomes bfloat16
    return EagerParamBase.from_tensor(tensor, name=name, trainable=False)
