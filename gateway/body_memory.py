"""Memory budget of request bodies: how many bytes a worker accepts at once, checked before a body is read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from engine.errors import Overloaded
from engine.settings.config import Config

LARGE_BYTES = 64 << 10  # smaller bodies are not counted: the model's queue limits their number
# Of large requests without a first answer, in all workers together: room for NUM_LARGEST of the largest, within these
OPEN_BYTES, MAX_OPEN_BYTES, NUM_LARGEST = 64 << 20, 512 << 20, 16


class BodyMemoryReservation:
    """Memory that one request has reserved from a BodyMemoryBudget, until it is released."""

    def __init__(self, budget: BodyMemoryBudget):
        self._budget = budget
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Grow the reservation to `num_bytes`.

        Raise Overloaded if the budget is exhausted: a request that waited would hold the memory that it waits for.
        """
        if num_bytes <= max(LARGE_BYTES, self.num_bytes):
            return
        budget, more = self._budget, num_bytes - self.num_bytes
        if budget.num_bytes + more > budget.max_bytes:
            text = (
                "request bodies in memory have {value} bytes, with this one more than the limit of {limit}; retry later"
            )
            raise Overloaded(text, value=budget.num_bytes, limit=budget.max_bytes)
        budget.num_bytes += more
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Return the memory to the budget. The call is idempotent."""
        self._budget.num_bytes -= self.num_bytes
        self.num_bytes = 0


class BodyMemoryBudget:
    """Memory budget of one worker for large request bodies."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes = 0  # reserved
        self._reading = asyncio.Lock()

    @classmethod
    def for_worker(cls, config: Config) -> BodyMemoryBudget:
        """Return the share of one worker. It is never smaller than the largest request that is allowed."""
        open_bytes = max(OPEN_BYTES, min(NUM_LARGEST * config.max_body_bytes, MAX_OPEN_BYTES))
        return cls(max(open_bytes // config.push_mode_http_workers, config.max_body_bytes))

    @contextlib.asynccontextmanager
    async def reading(self, num_bytes: int) -> AsyncIterator[None]:
        """Limit the CPU time spent on large bodies.

        They are parsed one after the other, and after each one the event loop is free for as long as the parsing took.
        """
        if num_bytes <= LARGE_BYTES:
            yield
            return
        async with self._reading:
            started = time.monotonic()
            try:
                yield
            finally:
                await asyncio.sleep(time.monotonic() - started)
