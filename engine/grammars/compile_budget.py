"""Compile time of each owner of an API key."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

MAX_OWNERS = 10_000


class CompileBudget:
    """CPU seconds that an owner has used; they are forgotten at the rate of `seconds_per_minute`."""

    def __init__(self, seconds_per_minute: float, clock: Callable[[], float] = time.monotonic):
        self.seconds_per_minute = seconds_per_minute
        self._clock = clock
        self._used: dict[str, tuple[float, float]] = {}  # seconds, and when that was

    def charge(self, owner: str, seconds: float) -> None:
        used = self._used_by(owner)
        if len(self._used) >= MAX_OWNERS:
            self._used = {name: each for name, each in self._used.items() if self._used_by(name) > 0}
        self._used[owner] = used + seconds, self._clock()

    def wait_s(self, owner: str) -> int:
        """Return after how many seconds the owner may compile again; 0: now."""
        excess = self._used_by(owner) - self.seconds_per_minute
        return 0 if excess < 0 else math.floor(60 * excess / self.seconds_per_minute) + 1

    def _used_by(self, owner: str) -> float:
        used, at = self._used.get(owner, (0.0, 0.0))
        return max(0.0, used - (self._clock() - at) * self.seconds_per_minute / 60)
