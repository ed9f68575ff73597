"""Timer for waits that take too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class IdleTimer:
    """Calls `give_up` when a wait exceeds `limit_s` seconds. The first wait begins at construction.

    There is one event-loop timer, which is checked when it fires, so that a wait costs only two assignments.
    """

    def __init__(self, give_up: Callable[[], object], limit_s: float):
        self._give_up = give_up
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self.was_too_long = False
        self.start_wait()
        self._timer = self._loop.call_later(limit_s, self._look)

    def start_wait(self) -> None:
        """Begin a wait."""
        self._since: float | None = self._loop.time()

    def end_wait(self) -> None:
        """End the current wait."""
        self._since = None

    def close(self) -> None:
        """Cancel the timer."""
        self._timer.cancel()

    def _look(self) -> None:
        remaining_s = self._limit_s
        if self._since is not None:
            remaining_s += self._since - self._loop.time()
        if remaining_s > 0:
            self._timer = self._loop.call_later(remaining_s, self._look)
        else:
            self.was_too_long = True
            self._give_up()
