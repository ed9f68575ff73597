"""Run an exported graph on a device. Each executor is one file; `make_executor` picks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.types import Executor
from engine.errors import ConfigError
from engine.exporting.manifest import Manifest
from engine.models.keys import ModelError
from engine.settings.config import Config

if TYPE_CHECKING:
    from engine.ops.cpu.group import Membership


def make_executor(graph_dir: Path, config: Config) -> Executor:
    """The executor of DEVICE for the exported model in `graph_dir`, with all its ranks. Raises SetupError."""
    manifest = Manifest.read(graph_dir)
    num_ranks = manifest.num_ranks
    if missing := manifest.missing_files(graph_dir):
        raise ModelError(f"{graph_dir}: {missing[0]} is missing; export the model again from its checkpoint")
    if num_ranks != config.mp_num:
        raise ConfigError(f"MP_NUM is {config.mp_num}, but {graph_dir} was exported for {num_ranks} ranks")
    if num_ranks == 1:
        return make_rank(graph_dir, config)
    from engine.executors.ranks import RanksExecutor, start_ranks, wait_until_ready
    from engine.ops.cpu import group

    segment_fd = group.create_segment(num_ranks)
    memberships = [group.Membership(rank, num_ranks, segment_fd) for rank in range(num_ranks)]
    others = start_ranks(graph_dir, config, memberships[1:])
    first = make_rank(graph_dir, config, memberships[0])
    wait_until_ready(others)
    os.close(segment_fd)
    return RanksExecutor(first, others)


def make_rank(graph_dir: Path, config: Config, membership: Membership | None = None) -> Executor:
    """One rank of the model, in this process; without `membership` there is no other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No ccache found")  # Paddle's own, at import
        from engine.executors.paddle import PaddleExecutor  # Paddle takes a second to import

    return PaddleExecutor(graph_dir, config, membership)
