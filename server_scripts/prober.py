"""The supervisor's second thread: asks the server how it is, so that a silent server cannot hold the supervisor up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

ASK_EVERY_S = 5.0
ASK_EVERY_WHILE_STARTING_S = 0.1
CHECK_FOR_S = 30.0  # how long the first real requests may fail, as the gateway is still starting


class Probes(Protocol):
    """server_scripts.probe for real, a list of answers in tests."""

    def is_live(self) -> bool: ...

    def state(self) -> dict[str, Any]: ...

    def check(self) -> None: ...


@dataclass(frozen=True)
class Observation:
    """What is known of the server. Times are seconds of the monotonic clock."""

    at: float = 0.0
    is_live: bool = False  # tritonserver answers
    state: dict[str, Any] | None = None  # what the model says; None: it did not answer
    error: str = ""  # why not
    num_failures: int = 0  # times in a row
    checked: bool = False  # a real request came back through every port
    check_error: str = ""  # why that did not happen, after trying for long enough


class Prober:
    """Calls `wake` after every observation. `latest` is replaced as a whole, so it may be read from any thread."""

    def __init__(
        self,
        make_probes: Callable[[], Probes],
        wake: Callable[[], None],
        ask_every_s: float = ASK_EVERY_S,
        check_for_s: float = CHECK_FOR_S,
    ):
        self.latest = Observation()
        self._make_probes = make_probes
        self._wake = wake
        self._ask_every_s = ask_every_s
        self._check_for_s = check_for_s
        self._check_until: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prober", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def forget(self) -> None:
        """What was seen of a tritonserver that has ended says nothing of the next one."""
        self.latest = replace(self.latest, is_live=False, state=None, num_failures=0)

    def _run(self) -> None:
        probes = self._make_probes()  # here, as the imports take their time
        while not self._stop.is_set():
            before = self.latest
            now = self._observe(probes, before)
            if self.latest is before:  # else it was forgotten meanwhile
                self.latest = now
            self._wake()
            self._stop.wait(self._ask_every_s if now.checked and now.is_live else ASK_EVERY_WHILE_STARTING_S)

    def _observe(self, probes: Probes, before: Observation) -> Observation:
        if not probes.is_live():
            failures = before.num_failures + 1
            return replace(before, at=time.monotonic(), is_live=False, error="no answer", num_failures=failures)
        try:
            state = probes.state()
        except Exception as error:  # whatever came back, it was not an answer
            failures = before.num_failures + 1
            return replace(
                before, at=time.monotonic(), is_live=True, state=None, error=str(error), num_failures=failures
            )
        now = replace(before, at=time.monotonic(), is_live=True, state=state, error="", num_failures=0)
        return now if now.checked or not state.get("ready") else self._check(probes, now)

    def _check(self, probes: Probes, now: Observation) -> Observation:
        self._check_until = self._check_until or time.monotonic() + self._check_for_s
        try:
            probes.check()
            return replace(now, checked=True)
        except Exception as error:
            return replace(now, check_error=str(error) if time.monotonic() > self._check_until else "")
