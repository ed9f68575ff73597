"""Interface of executors of an exported graph on CPUs or GPUs, on one or more ranks."""

from __future__ import annotations

from typing import Protocol

from engine.core.executor import Executor
from engine.executors.block_access import BlockAccess
from engine.executors.speculation.draft_model import DraftGraph


class DeviceExecutor(Executor, Protocol):
    """Executor with access to its blocks beside the steps, and to further graphs of its model."""

    def blocks(self) -> BlockAccess:
        """Return the access to the blocks that are allocated now."""
        ...

    def load_draft_graph(self, name: str) -> DraftGraph:
        """Load the graph of the model with this name, which drafts for it. Raises ModelError that lists the graphs
        there are."""
        ...
