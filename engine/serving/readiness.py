"""Whether a request would be answered now, and why not: the engine's health, and the announced end of the server."""

from __future__ import annotations

import contextlib
import time

from engine.errors import EngineUnavailable
from engine.link.client import EngineClient
from engine.link.messages import STARTING
from engine.serving.options import ServiceOptions
from engine.settings.stopping import Stopping

MAX_SILENCE_S = 2.0  # of an engine that is ready: it answers four times a second, also while it computes
MIN_STEP_LIMIT_S = 5.0  # other processes may need the cores, too


class Readiness:
    """RequestState from any thread."""

    def __init__(self, client: EngineClient, options: ServiceOptions):
        self.is_draining = False  # nothing is taken any more
        self._client = client
        self._options = options
        self._end: Stopping | None = None  # that is announced

    def not_ready_reason(self) -> str:
        """Empty when a request would be answered."""
        if self.is_draining or self._end:
            return self.stopping.text
        if failure := self._client.failure():
            return failure
        if self._client.silent_s == float("inf"):
            return "the engine is starting"
        if starting := self._client.stats.get(STARTING):
            return f"the engine is starting: {starting}"
        if self._client.silent_s > MAX_SILENCE_S:
            return f"the engine has been silent for {self._client.silent_s:.0f} s"
        age_s, expected_s = self._client.stats.get("step_age_s", 0.0), self._client.stats.get("step_limit_s", 0.0)
        longest_s = self._options.hang_after_s
        if age_s > min(max(expected_s, MIN_STEP_LIMIT_S) if expected_s else longest_s, longest_s):
            return f"the engine has been computing one step for {age_s:.0f} s"
        return ""

    @property
    def stopping(self) -> EngineUnavailable:
        """What is told to those who are refused or ended by it."""
        return EngineUnavailable(self._end.why if self._end else Stopping.why)

    def is_drain_over(self) -> bool:
        """Of an announced end: for those who are still open. Triton would end their streams without a final response,
        and begins to do so before it tells us. To be asked all the time."""
        if self._end is None and self._options.stopping_file:
            with contextlib.suppress(FileNotFoundError):
                self._end = Stopping.of(self._options.stopping_file.read_text())
        if self._end is None:
            return False
        now, refuse_at, end_at = time.monotonic(), self._end.refuse_at, self._end.end_at
        self.is_draining |= now >= refuse_at
        return now >= (refuse_at + self._options.drain_s if end_at is None else end_at)
