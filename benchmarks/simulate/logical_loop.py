"""Event loop of asyncio on a logical clock: instead of waiting for a timer it sets the clock to the timer's time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NoEventLeft(Exception):
    """Everything waits, but no timer is left that could end a wait."""


class _Selector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise NoEventLeft("the simulation waits, but no event is left")
        self.now += max(0.0, timeout)
        return []


class LogicalLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time` starts at 0. It knows no sockets and no threads."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a logical clock, cancel the tasks that it has left, and return its result."""
    loop = LogicalLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
