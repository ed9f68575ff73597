"""Traces the network of one rank with Paddle and saves it: the part of the export that needs Paddle."""

from __future__ import annotations

import contextlib
import time
import unittest.mock
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.base.framework import EagerParamBase

from engine.exporting.manifest import Graph
from engine.models.checkpoint import Checkpoint
from engine.models.decoder import Decoder
from engine.models.layers import Run
from engine.models.weights import Constant, found_in, weights_of
from engine.ops import build
from engine.ops.cpu.paddle_ops import register_paddle_ops

REPORT_EVERY_S = 2.0


class Traced(nn.Layer):
    """A network with its parameters and the names of its inputs, as Paddle wants it."""

    def __init__(self, network: Decoder, graph: Graph, params: Mapping[str, EagerParamBase]):
        super().__init__()
        self._network, self._params = network, dict(params)
        self._names = [*graph.inputs, *(cache.name for cache in graph.caches)]
        for name, parameter in params.items():
            self.add_parameter(name.replace(".", "/"), parameter)  # Paddle allows no dots here

    @paddle.jit.not_to_static  # traced as it stands: no branch depends on values
    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        named = dict(zip(self._names, inputs, strict=True))
        return list(self._network(Run(register_paddle_ops(), self._params, named)))


def save_rank(
    directory: Path, network: Decoder, graph: Graph, checkpoint: Checkpoint | None, progress: Callable[[str], None]
) -> None:
    """Writes the graph and its parameters into `directory`. Without a checkpoint the graph alone."""
    paddle.set_device("cpu")
    build.library(build.PADDLE_OPS, report=progress)
    register_paddle_ops()
    params = _load(network, checkpoint, progress) if checkpoint else _imagined(network)
    traced = Traced(network, graph, params)
    traced.eval()
    progress("trace and save the graph")
    stem = Path(graph.program).stem
    with contextlib.ExitStack() as stack:
        if checkpoint is None:  # Paddle has no way to leave the parameters out
            stack.enter_context(unittest.mock.patch("paddle.static.pir_io.save_vars_pir"))
        paddle.jit.save(traced, str(directory / stem), input_spec=[_input_specs(graph)])


def _load(network: Decoder, checkpoint: Checkpoint, progress: Callable[[str], None]) -> dict[str, EagerParamBase]:
    """The parameters by name. Beside them one tensor at a time is in memory."""
    params = {constant.name: _parameter(constant.name, constant.values) for constant in found_in(network, Constant)}
    weights = weights_of(network)
    reported = time.monotonic()
    for count, (name, weight) in enumerate(weights.items()):
        if time.monotonic() > reported + REPORT_EVERY_S:
            reported = time.monotonic()
            progress(f"load weights, {count} of {len(weights)} tensors")
        stored = checkpoint.stored(weight)
        for stored_name, array in zip(weight.format.parameters(name), stored, strict=True):
            params[stored_name] = _parameter(stored_name, array)
    return params


def _imagined(network: Decoder) -> dict[str, EagerParamBase]:
    """Parameters whose memory nobody ever touches, so that it costs nothing."""
    stored = {constant.name: (constant.values, len(constant.values)) for constant in found_in(network, Constant)}
    for name, weight in weights_of(network).items():
        num_rows, *inner = weight.shape
        of_a_row = weight.format.store(np.zeros((1, *inner), np.dtype(weight.format.read_as)))
        stored |= {each: (row, num_rows) for each, row in zip(weight.format.parameters(name), of_a_row, strict=True)}
    tensors = {name: paddle.empty((rows, *row.shape[1:]), _dtype_of(row)) for name, (row, rows) in stored.items()}
    return {name: EagerParamBase.from_tensor(each, name=name, trainable=False) for name, each in tensors.items()}


def _dtype_of(array: np.ndarray) -> Any:
    """uint16 stands for bfloat16."""
    return "bfloat16" if array.dtype == np.uint16 else array.dtype.name


def _parameter(name: str, array: np.ndarray) -> EagerParamBase:
    if array.dtype == "bfloat16":
        array = array.view(np.uint16)  # from which Paddle makes bfloat16
    return EagerParamBase.from_tensor(paddle.to_tensor(array, place=paddle.CPUPlace()), name=name, trainable=False)


def _input_specs(graph: Graph) -> list[paddle.static.InputSpec]:
    """Ids and positions of a step, then the caches."""
    step = [
        paddle.static.InputSpec([None, None] if name == "block_tables" else [None], "int32", name)
        for name in graph.inputs
    ]
    caches = [
        paddle.static.InputSpec(cache.shape_of(-1), cache.dtype, cache.name)  # type: ignore[arg-type]
        for cache in graph.caches
    ]
    return step + caches
