"""Executors run an exported graph on a device. `make_executor` selects the executor of DEVICE."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from engine.core.executor import Executor
from engine.errors import ConfigError
from engine.executors.device_executor import DeviceExecutor
from engine.executors.memory import check_host_memory
from engine.executors.speculation.executor import with_speculation
from engine.executors.speculation.policy import DraftPolicy
from engine.executors.speculation.proposer import Proposer
from engine.executors.speculation.state import runs_ahead
from engine.exporting.draft import check_layer, export_draft_model
from engine.exporting.manifest import Manifest
from engine.log import Report
from engine.models.config import DRAFT_GRAPHS
from engine.models.config_fields import ModelError
from engine.settings.config import Config
from engine.settings.device import GPU, check_gpus, with_device

if TYPE_CHECKING:
    from engine.ops.cpu.group import Membership


LOADING = "the model is being loaded"


def make_executor(
    graph_dir: Path, config: Config, report: Report = lambda text: None, *, owns_process: bool = True
) -> Executor:
    """Make the executor of DEVICE for the exported model in `graph_dir`, with all its ranks.

    With several machines, wait for the others and pass to `report` which of them are missing. The call does not return
    on the machines that are not the master: their ranks follow the master's executor. Without `owns_process`, the end
    of a CPU rank raises an error in the step that waits for it, instead of ending this process. Raises SetupError.
    """
    config = with_device(config)
    check_host_memory(config)
    manifest, machines = Manifest.read(graph_dir), config.machines
    check_num_ranks(graph_dir, manifest, config)
    if config.device == GPU:
        check_gpus(config)
    if missing := manifest.missing_files(graph_dir, machines.ranks):
        raise ModelError(f"{graph_dir}: {missing[0]} is missing; export the model again from its checkpoint")
    if config.speculate_method in DRAFT_GRAPHS:
        check_layer(graph_dir, config)
    draft_dir = export_draft_model(graph_dir, config, report) if machines.is_master else None
    if machines.num_hosts == 1:
        executor = make_host(graph_dir, config, owns_process=owns_process, report=report)
    else:
        from engine.executors.distributed.hosts import follow, lead

        executor = lead(graph_dir, config, report) if machines.is_master else follow(graph_dir, config, report)
    if config.speculate_method in DRAFT_GRAPHS:
        proposer: Proposer | None = make_mtp_proposer(executor, manifest, config)
    else:
        proposer = make_draft_model_proposer(draft_dir, manifest, config, executor)
    return with_speculation(executor, config, DraftPolicy(runs_ahead(executor)), proposer)


def make_draft_model_proposer(
    draft_dir: Path | None, manifest: Manifest, config: Config, executor: DeviceExecutor | None = None
) -> Proposer | None:
    """Load the exported draft model in `draft_dir` for the model of `manifest`, on a GPU onto that of the first rank of
    `executor`, which has loaded it. Without a draft model, return None."""
    if draft_dir is None:
        return None
    from engine.executors.speculation.draft_model import DraftModel
    from engine.executors.speculation.draft_slots import SlotSizes
    from engine.executors.speculation.model_proposer import DraftModelProposer

    sizes = SlotSizes.of(manifest, config.batch_size)
    if config.device == GPU:
        from engine.executors.cuda.draft_model import CudaDraftModel
        from engine.executors.cuda.executor import CudaExecutor

        first = _first_rank(executor)
        assert isinstance(first, CudaExecutor)
        model: DraftModel = CudaDraftModel.load(draft_dir, first.runner, config, sizes)
    else:
        from engine.executors.cpu.draft_model import CpuDraftModel

        model = CpuDraftModel.load(draft_dir, sizes)
    return DraftModelProposer(model, manifest.vocab_size)


def make_mtp_proposer(executor: DeviceExecutor, manifest: Manifest, config: Config) -> Proposer:
    """Load the layer that drafts for the model that `executor` has loaded, on all its ranks: its MTP layer or its
    EAGLE-3 head."""
    from engine.executors.speculation.draft_model import MtpLayer
    from engine.executors.speculation.mtp_proposer import MtpProposer

    method = config.speculate_method
    draft_graph, first = executor.load_draft_graph(method), _first_rank(executor)
    if config.device == GPU:
        from engine.executors.cuda.draft_model import CudaMtpLayer
        from engine.executors.cuda.executor import CudaExecutor

        assert isinstance(first, CudaExecutor)
        layer: MtpLayer = CudaMtpLayer(first.runner, draft_graph, config)
    else:
        from engine.executors.cpu.draft_model import CpuMtpLayer
        from engine.executors.cpu.executor import CpuExecutor

        assert isinstance(first, CpuExecutor)
        layer = CpuMtpLayer(first, draft_graph, config.batch_size, method)
    return MtpProposer(layer, manifest.vocab_size, method)


def _first_rank(executor: DeviceExecutor | None) -> DeviceExecutor | None:
    """Return the executor of the rank in this process."""
    from engine.executors.distributed.ranks import RanksExecutor

    while isinstance(executor, RanksExecutor):  # of several hosts, the first has several ranks
        executor = executor.first
    return executor


def check_num_ranks(graph_dir: Path, manifest: Manifest, config: Config) -> None:
    """Raise ConfigError unless MP_NUM is the number of ranks that the model was exported for, and its experts are
    divided among them as ENABLE_EXPERT_PARALLEL=1 asks."""
    if (num_ranks := manifest.num_ranks) != config.mp_num:
        raise ConfigError(
            f"MP_NUM is {config.mp_num}, {graph_dir} was exported for {num_ranks}; set MP_NUM={num_ranks}"
        )
    if config.enable_expert_parallel and num_ranks > 1 and not manifest.expert_parallel:
        raise ConfigError(
            f"ENABLE_EXPERT_PARALLEL is 1, {graph_dir} was exported without it; set it to 0, or export the checkpoint"
            " with --expert-parallel"
        )


def make_host(
    graph_dir: Path,
    config: Config,
    peers: Sequence[socket] = (),
    *,
    owns_process: bool = True,
    report: Report = lambda text: None,
) -> DeviceExecutor:
    """Start the ranks of this machine and return their executor.

    `peers` are connections to the first rank of each other machine. `report` is called with the progress of long
    preparations.
    """
    if config.mp_num == 1:
        return make_rank(graph_dir, config, report=report)
    from engine.executors.distributed.ranks import RanksExecutor, refuse_second_group, start_ranks, wait_until_ready
    from engine.executors.expert_placement import orders_by_usage
    from engine.ops.cpu import group

    refuse_second_group(config)
    num_hosts, (first_rank, *others) = config.machines.num_hosts, config.machines.ranks
    # Ranks on GPUs use the shared memory only to exchange their addresses; ranks on CPUs exchange all data through it.
    is_gpu = config.device == GPU
    shared_memory_fd = os.memfd_create("llm_group") if is_gpu else group.create_shared_memory(config.mp_num, num_hosts)
    orders = orders_by_usage(graph_dir, config)
    memberships = [group.Membership(rank, config.mp_num, shared_memory_fd, num_hosts, (), orders) for rank in others]
    started = start_ranks(graph_dir, config, memberships, ends_process=owns_process or is_gpu)
    connections, of_blocks = [each for each, _ in started], [each for _, each in started]
    mine = group.Membership(first_rank, config.mp_num, shared_memory_fd, num_hosts, tuple(peers), orders)
    try:
        first = make_rank(graph_dir, config, mine, report)
        wait_until_ready(connections)
    except BaseException:
        for connection in (*connections, *of_blocks):
            connection.close()
        if not is_gpu:
            group.leave()
        raise
    finally:
        if not is_gpu:
            os.close(shared_memory_fd)
    return RanksExecutor(first, connections, of_blocks) if connections else first


def make_rank(
    graph_dir: Path,
    config: Config,
    membership: Membership | None = None,
    report: Report = lambda text: None,
) -> DeviceExecutor:
    """Load one rank of the model in this process. Without `membership` it is the only rank."""
    if config.device == GPU:
        from engine.executors.cuda.executor import CudaExecutor  # This imports torch.

        return CudaExecutor(graph_dir, config, membership=membership, report=report)
    from engine.executors.cpu.executor import CpuExecutor

    return CpuExecutor(graph_dir, config, membership)
