"""How much of what clients send a worker takes in at once, counted before anything is read of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from engine.errors import Overloaded
from engine.settings.config import Config

LARGE_BYTES = 64 << 10  # smaller requests are not counted here: the model limits their number
OPEN_BYTES = 64 << 20  # of large requests that the model has not begun to answer, in all workers


class BodyMemoryReservation:
    """What one request takes of an Intake, until it is given back."""

    def __init__(self, intake: BodyMemoryBudget):
        self._intake = intake
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Raises Overloaded when there is no room now: who waits would hold what it waits with."""
        if num_bytes <= max(LARGE_BYTES, self.num_bytes):
            return
        intake, more = self._intake, num_bytes - self.num_bytes
        if intake.num_bytes + more > intake.max_bytes:
            text = "large requests that wait to be read have {value} bytes, with this one more than {limit}"
            raise Overloaded(text, value=intake.num_bytes, limit=intake.max_bytes)
        intake.num_bytes += more
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Idempotent."""
        self._intake.num_bytes -= self.num_bytes
        self.num_bytes = 0


class BodyMemoryBudget:
    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes = 0  # taken
        self._reading = asyncio.Lock()

    @classmethod
    def for_worker(cls, config: Config) -> BodyMemoryBudget:
        """At least the largest request, however many workers share."""
        return cls(max(OPEN_BYTES // config.push_mode_http_workers, config.max_body_bytes))

    @contextlib.asynccontextmanager
    async def reading(self, num_bytes: int) -> AsyncIterator[None]:
        """Around what keeps this process busy with a request: large ones one after the other, and after each as much
        time for all others as it has taken."""
        if num_bytes <= LARGE_BYTES:
            yield
            return
        async with self._reading:
            started = time.monotonic()
            try:
                yield
            finally:
                await asyncio.sleep(time.monotonic() - started)
