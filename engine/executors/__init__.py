"""Run an exported graph on a device. Each executor is one file; `make_executor` picks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.types import Executor
from engine.errors import ConfigError
from engine.exporting.manifest import Manifest
from engine.settings.config import Config

if TYPE_CHECKING:
    from engine.ops.cpu.group import Membership


def make_executor(graph_dir: Path, config: Config) -> Executor:
    """The executor of DEVICE for the exported model in `graph_dir`, with all its ranks. Raises SetupError."""
    num_ranks = Manifest.read(graph_dir).num_ranks
    if num_ranks != config.mp_num:
        raise ConfigError(f"MP_NUM is {config.mp_num}, but {graph_dir} was exported for {num_ranks} ranks")
    if num_ranks == 1:
        return make_rank(graph_dir, config)
    from engine.executors.ranks import RanksExecutor, start_ranks, wait_until_ready
    from engine.ops.cpu import group

    segment_fd = group.create_segment(num_ranks)
    others = start_ranks(graph_dir, range(1, num_ranks), segment_fd)
    first = make_rank(graph_dir, config, group.Membership(0, num_ranks, segment_fd))
    wait_until_ready(others)
    return RanksExecutor(first, others)


def make_rank(graph_dir: Path, config: Config, membership: Membership | None = None) -> Executor:
    """One rank of the model, in this process; without `membership` there is no other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No ccache found")  # Paddle's own, at import
        from engine.executors.paddle import PaddleExecutor  # Paddle takes a second to import

    return PaddleExecutor(graph_dir, config, membership)
