"""Loading of an exported model's files into a program whose parameters are on the device."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import NamedTuple

import torch

from engine import graph as graphs
from engine.errors import ConfigError
from engine.executors.cuda import weights
from engine.executors.cuda.host_experts import HostExperts
from engine.executors.cuda.program import CudaProgram, Params, check_ops
from engine.executors.expert_placement import Orders, reorder_experts
from engine.exporting.manifest import GraphManifest
from engine.models.constants import constants_of

log = logging.getLogger(__name__)
NO_PARAMS: Params = MappingProxyType({})


class RankFiles(NamedTuple):
    """A graph in the folder of one rank."""

    directory: Path
    graph: GraphManifest
    expert_orders: Orders = MappingProxyType({})


def load_program(
    files: RankFiles,
    device: torch.device,
    ops: ModuleType,
    shared: Params = NO_PARAMS,
    host_experts: HostExperts | None = None,
) -> CudaProgram:
    """Load a graph of one rank. Parameters of another graph that are `shared` are taken from there.
    `host_experts` leaves experts on the host.

    `ops` is engine.ops.cuda or a module like it. Raises ConfigError if the weights are too large for the device, and
    GraphError for an op that it does not have.
    """
    started = time.monotonic()
    directory, names, orders = files
    graph = graphs.read_graph(directory / names.program, names.outputs)
    check_ops(graph, ops)  # before the weights are read
    own = weights.without(graph, shared)
    size = weights.num_bytes(own)
    try:
        if names.parameters:
            read = reorder_experts(
                graph, graphs.read_params(directory / names.parameters, graph), orders, directory.parent
            )
            load = partial(weights.load, params=read, device=device)
        else:
            load = partial(weights.draw, constants=constants_of(directory.parent), device=device)
        params = host_experts.load(own, load) if host_experts else load(own)
    except torch.cuda.OutOfMemoryError:
        free, total = (number / 2**30 for number in torch.cuda.mem_get_info(device))
        raise ConfigError(
            f"the weights need {size / 2**30:.1f} GiB, the GPU has {total:.1f} GiB and none left after"
            f" {total - free:.1f} GiB"
        ) from None
    log.info("%.1f GB of weights loaded in %.1f s", size / 1e9, time.monotonic() - started)
    return CudaProgram(graph, params | {name: shared[name] for name in graph.parameters if name in shared}, ops)
