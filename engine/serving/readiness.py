"""Readiness of the server: the health of the engine, and the announced shutdown."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from engine.errors import EngineUnavailable
from engine.link.client import MAX_SILENCE_S, EngineClient
from engine.link.messages import STARTING
from engine.serving.options import ServiceOptions
from engine.settings.stopping import Stopping

if TYPE_CHECKING:
    from engine.link.engine_set import Engines

MIN_STEP_LIMIT_S = 5.0  # a step may be slow because other processes use the cores


class Readiness:
    """RequestState from any thread."""

    def __init__(self, client: Engines, options: ServiceOptions):
        self.is_draining = False  # new requests are refused
        self._client = client
        self._options = options
        self._end: Stopping | None = None  # the announced shutdown
        self._have_all_answered = False  # all engines, except those that have been given up

    def not_ready_reason(self) -> str:
        """Return why a request would not be answered now; empty if the server is ready."""
        if self.is_draining or self._end:
            return self.stopping.text
        reasons = [self._reason_of(engine) for engine in self._client.engines]
        if not self._have_all_answered:  # a start waits for all engines, as it may fail for one of them
            for engine, reason in zip(self._client.engines, reasons, strict=True):
                if reason and not engine.failure():
                    return reason
            self._have_all_answered = True
        return "" if "" in reasons else reasons[0]

    def _reason_of(self, engine: EngineClient) -> str:
        if failure := engine.failure():
            return failure
        if engine.silent_s == float("inf"):
            return "the engine is starting"
        if starting := engine.stats.get(STARTING):
            return f"the engine is starting: {starting}"
        if engine.silent_s > MAX_SILENCE_S:
            return f"the engine has been silent for {engine.silent_s:.0f} s"
        age_s, expected_s = engine.stats.get("step_age_s", 0.0), engine.stats.get("step_limit_s", 0.0)
        longest_s = self._options.hang_after_s
        if age_s > min(max(expected_s, MIN_STEP_LIMIT_S) if expected_s else longest_s, longest_s):
            return f"the engine has been computing one step for {age_s:.0f} s"
        return ""

    @property
    def is_stopping(self) -> bool:
        """Return whether a shutdown of the server has been announced. That of a model that is reloaded has an end."""
        return self._end is not None and self._end.end_at is None

    @property
    def stopping(self) -> EngineUnavailable:
        """Return the error of requests that the shutdown refuses or ends."""
        return EngineUnavailable(self._end.why if self._end else Stopping.why)

    def update_drain(self) -> bool:
        """Refuse new requests from the time on that a shutdown has announced. Return True when it must end the open
        ones: Triton itself would close their streams without a final response, and starts before it calls `finalize`.
        Must be called regularly."""
        if self._end is None and self._options.stopping_file:
            with contextlib.suppress(FileNotFoundError):
                self._end = Stopping.of(self._options.stopping_file.read_text())
        if self._end is None:
            return False
        now, refuse_at, end_at = time.monotonic(), self._end.refuse_at, self._end.end_at
        self.is_draining |= now >= refuse_at
        return now >= (refuse_at + self._options.drain_s if end_at is None else end_at)
