"""Run an exported graph on a device. Each executor is one file; `make_executor` picks."""

from __future__ import annotations

import warnings
from pathlib import Path

from engine.core.types import Executor
from engine.settings.config import Config


def make_executor(graph_dir: Path, config: Config) -> Executor:
    """The executor of DEVICE for rank 0 of the exported model in `graph_dir`. Raises SetupError."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No ccache found")  # Paddle's own, at import
        from engine.executors.paddle import PaddleExecutor  # Paddle takes a second to import

    return PaddleExecutor(graph_dir, config)
