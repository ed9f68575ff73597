"""Keeps the processes of a server alive. Knows processes and answers, not requests.

It is the parent of every process of the server, also of those whose own parent has died, so nothing can get lost.
`server_scripts.supervise` runs it; `server_scripts.shutdown` ends it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.settings.config import ENGINE_FAILED_FILE
from server_scripts.child import Child, ChildSpec
from server_scripts.prober import Observation, Prober
from server_scripts.processes import ENGINE, TRITONSERVER
from server_scripts.run_dir import RunDir, State
from server_scripts.wake import Wake

log = logging.getLogger("supervisor")

PR_SET_CHILD_SUBREAPER = 36
TICK_S = 0.5
MAX_SILENT_PROBES = 3
NEVER_S = 1e8  # the model says so of an engine that it has not met


class StartFailed(Exception):
    """The server will not become ready; the message says why."""


@dataclass(frozen=True)
class Limits:
    start_timeout_s: float
    drain_timeout_s: float
    hang_after_s: float  # without an answer of the engine


@dataclass
class Supervisor:
    specs: Sequence[ChildSpec]
    run_dir: RunDir
    state: State
    limits: Limits
    prober: Prober
    wake: Wake  # set by whoever has news for the loop
    engine_is_busy: Callable[[], bool] = lambda: False  # with requests; asked at the end only
    on_tick: Callable[[], None] = lambda: None
    children: list[Child] = field(init=False)
    seen: Observation = field(init=False)  # the last one that was acted on
    num_stop_signals: int = field(init=False, default=0)  # the first asks for an orderly end, the second insists

    def __post_init__(self) -> None:
        self.children = [Child(spec) for spec in self.specs]
        self.seen = self.prober.latest

    def install_signals(self) -> None:
        signal.signal(signal.SIGTERM, self._on_stop_signal)
        signal.signal(signal.SIGINT, self._on_stop_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            signal.signal(signal.SIGHUP, self._on_stop_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a signal without a handler wakes nobody
        self.wake.on_signals()
        blocked_by_start_server = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked_by_start_server)

    def _on_stop_signal(self, number: int, _frame: object) -> None:
        self.num_stop_signals += 1

    def bring_up(self, tell: Callable[[], None]) -> None:
        """Returns when the server is ready or asked to stop. `tell` is called all the time for those who wait."""
        started = time.monotonic()
        (self.run_dir.path / ENGINE_FAILED_FILE).unlink(missing_ok=True)
        for child in self.children:
            if not child.spec.waits_for_model_server:
                self._start(child)
                if child.process is None:
                    raise StartFailed(f"{child.spec.name} {child.last_words}")
        self.set_phase("starting")
        self.prober.start()
        while not self.seen.checked and not self.num_stop_signals:
            self.tick()
            tell()
            if self.seen.check_error:
                raise StartFailed(f"the model is ready, but a request was not answered: {self.seen.check_error}")
            if time.monotonic() - started > self.limits.start_timeout_s:
                raise StartFailed(f"not ready after START_TIMEOUT, {self.limits.start_timeout_s:g} s")
        if self.seen.checked:
            self.set_phase("ready")
            if self.run_dir.read_state() != self.state:  # start_server reads it there, and stop_server
                raise StartFailed(f"the state file in {self.run_dir.path} could not be written, see console.log")

    def watch(self) -> None:
        """Until a stop signal."""
        while not self.num_stop_signals:
            self.tick()

    def tick(self) -> None:
        self.wake.wait(TICK_S)
        self.reap()
        self._act_on_observation()
        self._watch_helpers()
        self._start_what_is_due()
        self.on_tick()

    def named(self, name: str) -> Child | None:
        return next((child for child in self.children if child.spec.name == name), None)

    def set_phase(self, phase: str) -> None:
        log.info("%s", phase)
        self.state.phase = phase
        self._write_state()

    def _write_state(self) -> None:
        running = [child for child in self.children if child.process]
        self.state.processes = [process for child in running for process in (child.process, *child.helpers) if process]
        try:
            self.run_dir.write_state(self.state)
        except OSError as error:  # a full disk must not end a server that runs
            log.error("the state file could not be written: %s", error)

    # Children

    def reap(self) -> None:
        for pid, status in dead_children(self._end_session):
            child = next((c for c in self.children if c.process and c.process.pid == pid), None)
            if child is None:
                continue  # an orphan that was adopted
            child.has_ended(status)
            if not self.num_stop_signals and self.state.phase != "stopping":
                self._act_on_end(child)

    def _end_session(self, pid: int) -> None:
        """Kills what a dead child has left behind. It is not reaped yet, so its number is nobody else's."""
        for child in self.children:
            if child.process and child.process.pid == pid:
                child.kill()

    def _act_on_end(self, child: Child) -> None:
        log.error("%s %s", child.spec.name, child.last_words)
        if self.state.phase == "starting":
            raise StartFailed(f"{child.spec.name} {child.last_words}")
        if child.spec.name == TRITONSERVER:
            self.prober.forget()
            self.run_dir.remove_shared_memory(self.state.shm_prefix)
        if child.restart_at is None:
            self._give_up(child)
        self._write_state()

    def _give_up(self, child: Child) -> None:
        """The reason goes to clients, so it says nothing that is only in the log."""
        reason = f"the {child.spec.name} {child.last_words}, {child.num_crashes} times in a row"
        log.error("%s; it is not started again", reason)
        if child.spec.name == ENGINE:
            self._write_failure(reason)

    def _write_failure(self, reason: str) -> None:
        path = self.run_dir.path / ENGINE_FAILED_FILE
        partial = path.with_name(f"{path.name}.partial")
        try:
            partial.write_text(reason)
            partial.replace(path)
        except OSError as error:
            log.error("%s could not be written: %s", path, error)

    def _start_what_is_due(self) -> None:
        if self.num_stop_signals:
            return
        for child in self.children:
            first = child.num_starts == 0 and child.spec.waits_for_model_server and self.seen.is_live
            again = child.restart_at is not None and time.monotonic() >= child.restart_at
            if first or again:
                self._start(child)

    def _start(self, child: Child) -> None:
        try:
            child.start()
        except OSError as error:
            child.could_not_start(error)
            log.error("%s %s", child.spec.name, child.last_words)
            return
        log.info("started %s, pid %d", child.spec.name, child.process.pid if child.process else 0)
        self._write_state()

    def _watch_helpers(self) -> None:
        """Triton 2.51 does not notice that its stub has died: every request would fail and the server look healthy."""
        for child in self.children:
            if child.process and not all(helper.is_alive for helper in child.helpers):
                log.error("a process that belongs to %s has died, ending %s", child.spec.name, child.spec.name)
                child.kill()

    # What the prober sees

    def _act_on_observation(self) -> None:
        seen = self.prober.latest
        if seen is self.seen:
            return
        self.seen = seen
        triton, engine = self.named(TRITONSERVER), self.named(ENGINE)
        if seen.state is not None:
            for child in self.children:
                if child.process and child.healthy_since is None and child is not engine:
                    child.healthy_since = seen.at
        if triton and triton.process and seen.at > triton.started_at:
            self._act_on_triton(triton, seen)
            if engine and engine.process and seen.state is not None:
                self._act_on_engine(engine, seen, float(seen.state.get("engine_silent_s", 0)), triton.started_at)

    def _act_on_triton(self, triton: Child, seen: Observation) -> None:
        if seen.is_live and triton.spec.has_helpers and not triton.helpers:
            triton.find_helpers()
            self._write_state()
        if self.state.phase != "ready":
            return
        age_s = seen.at - triton.started_at
        if triton.healthy_since and seen.num_failures >= MAX_SILENT_PROBES:
            log.error("tritonserver was silent %d times in a row, ending it: %s", seen.num_failures, seen.error)
            triton.kill()
        elif triton.healthy_since is None and age_s > self.limits.start_timeout_s:
            log.error("tritonserver has not been ready for %.0f s since its start, ending it: %s", age_s, seen.error)
            triton.kill()

    def _act_on_engine(self, engine: Child, seen: Observation, silent_s: float, triton_started_at: float) -> None:
        """Ends an engine that hangs. One that loads has not answered yet and may take its time."""
        age_s = seen.at - engine.started_at
        if engine.healthy_since is None and silent_s < age_s:
            engine.healthy_since = seen.at
        if silent_s >= NEVER_S:  # tritonserver is younger than the engine and has not met it
            silent_s = seen.at - triton_started_at
        if min(silent_s, age_s) > (self.limits.hang_after_s if engine.healthy_since else self.limits.start_timeout_s):
            log.error("the engine has been silent for %.0f s, ending it", silent_s)
            engine.kill()


def dead_children(before_reaping: Callable[[int], None]) -> list[tuple[int, int]]:
    """pid and wait status of every child that has ended, adopted ones too."""
    dead = []
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return dead
        if found is None:
            return dead
        before_reaping(found.si_pid)
        dead.append(os.waitpid(found.si_pid, 0))


def become_subreaper() -> None:
    """Orphans of our children become ours, so that they can be ended and do not stay behind as zombies."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
