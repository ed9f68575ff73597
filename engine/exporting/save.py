"""Traces the network of one rank with Paddle and saves it: the part of the export that needs Paddle."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

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
    directory: Path, network: Decoder, graph: Graph, checkpoint: Checkpoint, progress: Callable[[str], None]
) -> None:
    """Writes the graph and its parameters into `directory`."""
    paddle.set_device("cpu")
    build.library(build.PADDLE_OPS, report=progress)
    register_paddle_ops()
    traced = Traced(network, graph, _load(network, checkpoint, progress))
    traced.eval()
    progress("trace and save the graph")
    stem = Path(graph.program).stem
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
