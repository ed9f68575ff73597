"""Adapters (LoRA) that the executor has in memory: at most MAX_LORAS, the most recently used ones."""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine.core.executor import Executor
from engine.errors import Overloaded


class Adapters:
    """Loads and evicts adapters. `in_use` returns the ids of adapters that requests still need."""

    def __init__(self, executor: Executor, max_loras: int, in_use: Callable[[], Collection[str]]):
        self._executor = executor
        self._max_loras = max_loras
        self._in_use = in_use
        self._ids: dict[str, None] = {}  # least recently used first

    def ensure_loaded(self, adapter: tuple[str, ...]) -> None:
        """Load an adapter, unless it is in memory, for a request that is about to be added. Raises InvalidRequest if it
        cannot be loaded, and Overloaded if all adapters in memory are in use."""
        adapter_id = adapter[0]
        if adapter_id not in self._ids:
            self._make_room()
            self._executor.load_adapter(adapter)
        self._ids.pop(adapter_id, None)
        self._ids[adapter_id] = None

    def _make_room(self) -> None:
        if len(self._ids) < self._max_loras:
            return
        in_use = self._in_use()
        idle = next((each for each in self._ids if each not in in_use), None)
        if idle is None:
            text = "requests of {value} adapters run or wait, which are all that MAX_LORAS({limit}) allows in memory"
            raise Overloaded(text, field="lora_name", value=len(self._ids), limit=self._max_loras)
        self._executor.drop_adapter(idle)
        del self._ids[idle]
