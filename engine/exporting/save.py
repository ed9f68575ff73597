"""Traces the network of one rank with Paddle and saves it: the part of the export that needs Paddle."""

from __future__ import annotations

import time
import unittest.mock
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.base.framework import EagerParamBase

from engine.core.cache_groups import STATE, table_name
from engine.exporting.manifest import GraphManifest
from engine.log import Report
from engine.models.checkpoint import Checkpoint
from engine.models.layers import PREVIOUS_STATES, SPAN_EMBEDDINGS, Network, Run
from engine.models.vision import GRID_WEIGHTS, PATCHES
from engine.models.weights import Constant, Weight, found_in, weights_of
from engine.ops import build
from engine.ops.cpu.paddle_ops import register_paddle_ops
from engine.paddle_files import write_params

REPORT_EVERY_S = 2.0
FLOATS = (SPAN_EMBEDDINGS, PREVIOUS_STATES, PATCHES, GRID_WEIGHTS)  # inputs that are no whole numbers
Kind = tuple[tuple[int, ...], Any]  # of a parameter: its shape and its dtype as Paddle calls it


class Traced(nn.Layer):
    """A network with its parameters and the names of its inputs, as Paddle wants it."""

    def __init__(self, network: Network, graph: GraphManifest, params: Mapping[str, EagerParamBase]):
        super().__init__()
        self._network, self._params = network, dict(params)
        self._names = [*graph.inputs, *(cache.name for cache in graph.caches)]
        for name, parameter in params.items():
            self.add_parameter(name.replace(".", "/"), parameter)  # Paddle allows no dots here

    @paddle.jit.not_to_static  # traced as it stands: no branch depends on values
    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        named = dict(zip(self._names, inputs, strict=True))
        return list(self._network(Run(register_paddle_ops(), self._params, named, self._network.cache_layout.inputs)))


def save_graph(
    directory: Path,
    network: Network,
    graph: GraphManifest,
    checkpoint: Checkpoint | None,
    report: Report,
) -> None:
    """Write one graph and its parameters into the folder of a rank. Without a checkpoint, write the graph alone."""
    paddle.set_device("cpu")
    build.library(build.PADDLE_OPS, report=report)
    register_paddle_ops()
    if checkpoint:
        kinds = _write(directory / graph.parameters, _named(network), checkpoint, report)
    else:
        kinds = {name: kind for _, named in _named(network) for name, kind in _expected(named)}
    traced = Traced(network, graph, {name: _placeholder(name, kind) for name, kind in kinds.items()})
    traced.eval()
    report("trace and save the graph")
    # Paddle would want all parameters in memory, and has no way to leave them out.
    with unittest.mock.patch("paddle.static.pir_io.save_vars_pir"):
        paddle.jit.save(traced, str(directory / Path(graph.program).stem), input_spec=[_input_specs(graph, network)])


def _named(network: Network) -> list[tuple[str, Constant | Weight]]:
    constants = {constant.name: constant for constant in found_in(network, Constant)}
    return sorted((constants | dict(weights_of(network))).items())


def _write(
    path: Path, named: list[tuple[str, Constant | Weight]], checkpoint: Checkpoint, report: Report
) -> dict[str, Kind]:
    kinds = {}

    def each() -> Iterator[tuple[str, np.ndarray]]:
        reported = time.monotonic()
        for count, (name, source) in enumerate(named):
            if time.monotonic() > reported + REPORT_EVERY_S:
                reported = time.monotonic()
                report(f"load weights, {count} of {len(named)} tensors")
            if isinstance(source, Constant):
                stored = {name: source.values}
            else:
                stored = dict(zip(source.format.parameters(name), checkpoint.stored(source), strict=True))
            kinds.update({stored_name: (array.shape, _dtype_of(array)) for stored_name, array in stored.items()})
            yield from stored.items()

    write_params(path, each())
    return kinds


def _expected(source: Constant | Weight) -> Iterator[tuple[str, Kind]]:
    if isinstance(source, Constant):
        yield source.name, (source.values.shape, _dtype_of(source.values))
        return
    num_rows, *inner = source.shape
    of_a_row = source.format.store(np.zeros((1, *inner), np.dtype(source.format.read_as)))
    for name, row in zip(source.format.parameters(source.name), of_a_row, strict=True):
        yield name, ((num_rows, *row.shape[1:]), _dtype_of(row))


def _placeholder(name: str, kind: Kind) -> EagerParamBase:
    """Return a parameter whose memory is never accessed, so that it takes none."""
    return EagerParamBase.from_tensor(paddle.empty(*kind), name=name, trainable=False)


def _dtype_of(array: np.ndarray) -> Any:
    """Return the dtype of an array by Paddle's name; uint16 stands for bfloat16."""
    return "bfloat16" if array.dtype == np.uint16 else array.dtype.name


def _input_specs(graph: GraphManifest, network: Network) -> list[paddle.static.InputSpec]:
    """Return the input specifications: the inputs of a step, followed by the caches."""
    shapes = network.input_shapes | {
        table_name(index): (None, group.num_parts if group.kind == STATE else None)
        for index, group in enumerate(graph.cache_groups)
    }
    step = [
        paddle.static.InputSpec(list(shapes.get(name, (None,))), "float32" if name in FLOATS else "int32", name)
        for name in graph.inputs
    ]
    caches = [
        paddle.static.InputSpec(cache.shape_of(-1), cache.dtype, cache.name)  # type: ignore[arg-type]
        for cache in graph.caches
    ]
    return step + caches
