"""Which adapters the executor has in memory: as many as MAX_LORAS allows, those that were asked for last. Knows their
names, not what they are."""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine.core.types import Executor
from engine.errors import Overloaded


class Adapters:
    """`in_use` says which a request needs that has not ended."""

    def __init__(self, executor: Executor, max_loras: int, in_use: Callable[[], Collection[str]]):
        self._executor = executor
        self._max_loras = max_loras
        self._in_use = in_use
        self._ids: dict[str, None] = {}  # the one that was asked for last at the end

    def need(self, adapter: tuple[str, ...]) -> None:
        """Before its request is added. Raises InvalidRequest when it cannot be loaded, Overloaded when it has to wait
        for requests that need others."""
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
