"""Interpretation of the server's health: which processes are healthy, and which are silent for so long that they must
be ended.

A thread sends the probes, so that a silent server cannot block the supervisor. Its result is an immutable value.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.settings.config import Config
from server_scripts.child import Child
from server_scripts.probe import Probe

ASK_EVERY_S = 5.0
ASK_EVERY_WHILE_STARTING_S = 0.1
CHECK_FOR_S = 30.0  # how long the first real requests may fail while the gateway starts
MAX_SILENT_PROBES = 3
ENGINE_SILENT_S = 15.0  # the engine reports four times per second, also while it computes
NEVER_S = 1e8  # reported for an engine that has never connected


@dataclass(frozen=True)
class Observation:
    """Result of the latest probe. Times are seconds of the monotonic clock."""

    at: float = 0.0  # time of the probe: only processes that were running then can have answered
    state: dict[str, Any] | None = None  # the model's report; None: it did not answer
    error: str = ""  # reason if it did not answer
    num_failures: int = 0  # failures in a row
    checked: bool = False  # a real request was answered through every port, or by the model after a reload
    check_error: str = ""  # why it was not, after CHECK_FOR_S

    def of_engine(self, index: int) -> Observation:
        """Return the observation of the engine with this index."""
        if self.state is None or not (engines := self.state.get("engines")):
            return self
        silent_s, step_s = engines[index]
        return replace(self, state={**self.state, "engine_silent_s": silent_s, "engine_step_s": step_s})


class HealthMonitor:
    """Thread that probes the server. `latest` is replaced as a whole, so that any thread may read it."""

    def __init__(
        self,
        probe: Probe,
        ask_every_s: float = ASK_EVERY_S,
        check_for_s: float = CHECK_FOR_S,
        check: Callable[[], None] | None = None,
    ):
        """Take `check`, which sends a real request; None sends one to every port."""
        self.latest = Observation()
        self.probe = probe
        self._check_now = check or probe.check_all_ports
        self._ask_every_s = ask_every_s
        self._check_for_s = check_for_s
        self._check_until: float | None = None
        self._stop = threading.Event()
        self._soon = threading.Event()

    def again(self, check: Callable[[], None]) -> HealthMonitor:
        """Return a new monitor of the same server that has not seen anything yet."""
        return HealthMonitor(self.probe, self._ask_every_s, self._check_for_s, check)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="health", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread after its current probe."""
        self._stop.set()
        self._soon.set()

    def ask_soon(self) -> None:
        """Send the next probe soon. A restarted process counts as healthy only after an answer."""
        self._soon.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._soon.clear()
            self.ask()
            if self.latest.checked and not self._stop.is_set():
                self._soon.wait(self._ask_every_s)
            self._stop.wait(ASK_EVERY_WHILE_STARTING_S)

    def ask(self) -> None:
        """Probe the server once and replace `latest`."""
        at, before = time.monotonic(), self.latest
        try:
            state = self.probe.state()
        except Exception as error:  # any failure means that there is no valid answer
            self.latest = replace(before, at=at, state=None, error=str(error), num_failures=before.num_failures + 1)
            return
        seen = replace(before, at=at, state=state, error="", num_failures=0)
        self.latest = seen if seen.checked or not state.get("ready") else self._check(seen)

    def _check(self, seen: Observation) -> Observation:
        self._check_until = self._check_until or time.monotonic() + self._check_for_s
        try:
            self._check_now()
            return replace(seen, checked=True)
        except Exception as error:
            return replace(seen, check_error=str(error) if time.monotonic() > self._check_until else "")


def note_healthy(seen: Observation, engines: Sequence[Child], others: Sequence[Child]) -> None:
    """Mark processes as healthy.

    An answer of the model proves that all are, except the engines, each of which must have answered the model since its
    own start.
    """
    if seen.state is None:
        return
    for child in others:
        if child.was_running(seen.at):
            child.healthy_since = child.healthy_since or seen.at
    for index, engine in enumerate(engines):
        if engine.was_running(seen.at) and _engine_silent_s(seen.of_engine(index)) < seen.at - engine.started_at:
            engine.healthy_since = engine.healthy_since or seen.at


def why_triton_must_end(seen: Observation, triton: Child, config: Config) -> str:
    """Return the reason to end tritonserver, or "" if it may continue. The server must have been ready once."""
    age_s = seen.at - triton.started_at
    if triton.healthy_since and seen.num_failures >= MAX_SILENT_PROBES:
        return f"was silent {seen.num_failures} times in a row: {seen.error}"
    if triton.healthy_since is None and age_s > config.start_timeout_s:
        return f"has not been ready for {age_s:.0f} s since its start: {seen.error}"
    return ""


def why_engine_must_end(seen: Observation, engine: Child, triton: Child, config: Config) -> str:
    """Return the reason to end the engine, or "" if it may continue.

    An engine that is still loading has not answered yet and has the start timeout.
    """
    silent_s, step_s = _engine_silent_s(seen), float((seen.state or {}).get("engine_step_s", 0))
    if silent_s >= NEVER_S:  # tritonserver is younger than the engine and not connected yet
        silent_s = seen.at - triton.started_at
    limit_s = ENGINE_SILENT_S if engine.healthy_since else config.start_timeout_s
    if min(silent_s, seen.at - engine.started_at) > limit_s:
        return f"has been silent for {silent_s:.0f} s"
    if min(step_s, seen.at - engine.started_at) > config.check_health_interval_s:
        return f"has been computing one step for {step_s:.0f} s"
    return ""


def _engine_silent_s(seen: Observation) -> float:
    return float((seen.state or {}).get("engine_silent_s", 0))
