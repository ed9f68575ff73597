"""Supervisor: keeps the processes of a server alive.

It is the parent of every process of the server, also of those whose own parent has died, so that none is lost. If it
dies the others continue, and the next supervisor takes them over, though not as its children. `server_scripts.serve`
runs it and `server_scripts.shutdown` ends it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.settings.config import Config
from engine.settings.processes import FAILED_SUFFIX, STOPPING_FILE
from server_scripts import health
from server_scripts.child import Child, ChildSpec
from server_scripts.health import HealthMonitor, Observation
from server_scripts.processes import ENGINE, TRITONSERVER, kind_of
from server_scripts.run_dir import Process, RunDir, ServerState

log = logging.getLogger("supervisor")

PR_SET_CHILD_SUBREAPER = 36
TURN_S = 0.2  # polling interval, because the death of the stub, a child of tritonserver, sends no signal
TURN_WHILE_STARTING_S = 0.05  # shorter, because a user waits
MAX_START_ATTEMPTS = 3  # of tritonserver


class StartFailed(Exception):
    """The server will not become ready; the message gives the reason. The log of `child` has the details."""

    def __init__(self, message: str, child: Child | None = None):
        super().__init__(message)
        self.child = child


@dataclass
class Supervisor:
    """Supervisor of one server. It owns the child processes, the state file and the health monitor."""

    specs: Sequence[ChildSpec]
    run_dir: RunDir
    state: ServerState
    config: Config
    monitor: HealthMonitor
    every_turn: Callable[[], None] = lambda: None
    children: list[Child] = field(init=False)
    seen: Observation = field(init=False, default=Observation())  # last observation that was acted on
    stop_signal: int = field(init=False, default=0)  # the last stop signal
    num_stop_signals: int = field(init=False, default=0)  # the first one drains, the second one forces the end

    def __post_init__(self) -> None:
        self.children = [Child(spec) for spec in self.specs]
        self._signal_pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def adopt_and_listen(self) -> None:
        """Adopt orphans of the children from now on, so that they can be ended and reaped, and install the signal
        handlers. A signal ends `sleep`, also one that arrives just before it.
        """
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.set_wakeup_fd(self._signal_pipe[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only a signal with a handler writes to the wakeup fd
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_stop_signal)

    def _on_stop_signal(self, number: int, _frame: object) -> None:
        self.stop_signal = number
        self.num_stop_signals += 1

    def sleep(self, seconds: float) -> None:
        """Sleep for at most `seconds`, until a child ends or a stop signal arrives."""
        if select.select(self._signal_pipe[:1], [], [], seconds)[0]:
            os.read(self._signal_pipe[0], 1 << 16)

    def take_over(self, processes: Sequence[Process]) -> None:
        """Take over the processes of an earlier supervisor.

        The server is serving already: missing processes are started as after a crash, and this start cannot fail.
        """
        for child in self.children:
            child.take_over(processes)
        self.state.phase = "ready"

    def bring_up(self, tell: Callable[[], None]) -> None:
        """Start the server and return when it is ready or asked to stop.

        `tell` is called in every iteration, to report progress. Raise StartFailed.
        """
        started, is_new = time.monotonic(), self.state.phase != "ready"
        self.start_all()
        if is_new and (missing := next((child for child in self.children if child.process is None), None)):
            raise StartFailed(f"{missing.spec.name} {missing.exit_reason}", missing)
        self.set_phase("starting" if is_new else "ready")
        while not self.seen.checked and not self.num_stop_signals:
            self.turn(TURN_WHILE_STARTING_S)
            tell()
            if is_new and self.seen.check_error:
                raise StartFailed(f"the model is ready, but a request was not answered: {self.seen.check_error}")
            if is_new and time.monotonic() - started > self.config.start_timeout_s:
                raise StartFailed(f"not ready after START_TIMEOUT, {self.config.start_timeout_s:g} s")
        if self.seen.checked:
            self.set_phase("ready")
            if self.run_dir.read_state() != self.state:  # stop_server needs the file
                raise StartFailed(f"the state file in {self.run_dir.path} could not be written, see console.log")

    def watch_with(self, monitor: HealthMonitor) -> None:
        """Use `monitor` from now on and forget earlier observations."""
        self.monitor, self.seen = monitor, Observation()

    def start_all(self) -> None:
        """Start all processes that are not running, and the health monitor."""
        (self.run_dir.path / STOPPING_FILE).unlink(missing_ok=True)
        for child in self.children:
            (self.run_dir.path / f"{child.spec.name}{FAILED_SUFFIX}").unlink(missing_ok=True)
            if child.process is None:
                self._start(child)
        self.monitor.start()

    def turn(self, sleep_s: float) -> None:
        """Sleep until there is news, then do once everything that is due."""
        self.sleep(sleep_s)
        self.reap()
        self._act_on_observation()
        self._watch_triton()
        self._end_stopped()
        self._start_what_is_due()
        self.every_turn()

    def named(self, name: str) -> Child | None:
        """Return the child with this name, or None."""
        return next((child for child in self.children if child.spec.name == name), None)

    def set_phase(self, phase: str) -> None:
        """Set the phase of the server and write the state file."""
        log.info("%s", phase)
        self.state.phase = phase
        self._write_state()

    def _write_state(self) -> None:
        running = [child for child in self.children if child.process]
        self.state.processes = [process for child in running for process in (child.process, *child.helpers) if process]
        try:
            self.run_dir.write_state(self.state)
        except OSError as error:  # a full disk must not end a running server
            log.error("the state file could not be written: %s", error)

    # Children

    def reap(self) -> None:
        """Record every child that has ended. Adopted processes are only reaped."""
        while pid := _ended_child():
            child = next((c for c in self.children if c.process and c.process.pid == pid), None)
            if child:
                child.kill()  # ends its process group; the pid is not reaped yet, so it cannot be reused
            _, status = os.waitpid(pid, 0)
            if child:
                self._note_end(child, status)
        for child in self.children:
            if child.process and not child.is_ours and not child.process.is_alive:
                child.kill()
                self._note_end(child, None)

    def _note_end(self, child: Child, status: int | None) -> None:
        is_crash = child.record_end(status)
        if not self.num_stop_signals and self.state.phase not in ("stopping", "ending the model"):
            self._act_on_end(child, is_crash)

    def _act_on_end(self, child: Child, is_crash: bool) -> None:
        log.error("%s %s", child.spec.name, child.exit_reason)
        if self.state.phase == "starting" and is_crash and not _may_start_again(child):
            raise StartFailed(f"{child.spec.name} {child.exit_reason}", child)
        if child.spec.name == TRITONSERVER:
            self.run_dir.remove_shared_memory()
        if child.restart_at is None:
            self._give_up(child)
        self._write_state()

    def _give_up(self, child: Child) -> None:
        """Stop restarting a child.

        The reason is sent to clients, so it contains nothing that belongs only in the log.
        """
        reason = f"the {child.spec.name} {child.exit_reason}, {child.num_crashes} times in a row"
        log.error("%s; it is not started again", reason)
        name = f"{child.spec.name}{FAILED_SUFFIX}"
        try:
            self.run_dir.write(name, reason)
        except OSError as error:
            log.error("%s could not be written: %s", name, error)

    def _start_what_is_due(self) -> None:
        for child in self.children:
            if child.restart_at is not None and time.monotonic() >= child.restart_at and not self.num_stop_signals:
                self._start(child)

    def _start(self, child: Child) -> None:
        child.start()
        if child.process is None:
            log.error("%s %s", child.spec.name, child.exit_reason)
            return
        log.info("started %s, pid %d", child.spec.name, child.process.pid)
        self._write_state()

    @property
    def is_triton_coming_back(self) -> bool:
        """Return True while a restarted tritonserver has not answered yet."""
        triton = self.named(TRITONSERVER)
        return bool(self.state.phase == "ready" and triton and triton.process and triton.healthy_since is None)

    def _watch_triton(self) -> None:
        """End tritonserver if its stub has died.

        Triton 2.51 does not notice that, so every request would fail while the server looks healthy.
        """
        triton = self.named(TRITONSERVER)
        if self.is_triton_coming_back:
            self.monitor.ask_soon()
        if self.state.phase == "ready":
            self._find_helpers(triton)
        if triton and triton.process and not all(helper.is_alive for helper in triton.helpers):
            log.error("a process that belongs to %s has died, ending %s", TRITONSERVER, TRITONSERVER)
            triton.kill()

    def _find_helpers(self, child: Child | None) -> None:
        if child and not child.helpers:
            child.find_helpers()
            if child.helpers:
                self._write_state()

    def _end_stopped(self) -> None:
        """End processes that are stopped by SIGSTOP.

        Workers that share a port cannot be probed individually, and clients of a stopped one would wait forever.
        """
        for child in self.children:
            if child.check_stopped_for_long():
                self._end(child, "has been stopped for too long")

    def _act_on_observation(self) -> None:
        seen = self.monitor.latest
        if seen is self.seen:
            return
        self.seen = seen
        triton = self.named(TRITONSERVER)
        engines = [child for child in self.children if kind_of(child.spec.name) == ENGINE]
        health.note_healthy(seen, engines, [child for child in self.children if kind_of(child.spec.name) != ENGINE])
        if triton is None or not triton.was_running(seen.at):
            return
        has_ranks = self.config.mp_num > self.config.mp_nnode
        for child in (triton, *(engine for engine in engines if has_ranks and engine.healthy_since)):
            if seen.state is not None:
                self._find_helpers(child)
        if self.state.phase == "ready":
            self._end(triton, health.why_triton_must_end(seen, triton, self.config))
        for index, engine in enumerate(engines):
            if engine.process:
                self._end(engine, health.why_engine_must_end(seen.of_engine(index), engine, triton, self.config))

    def _end(self, child: Child, reason: str) -> None:
        if reason:
            log.error("%s %s; ending it", child.spec.name, reason)
            child.kill()


def _may_start_again(child: Child) -> bool:
    """Return whether a process that ended during the start is started once more.

    tritonserver aborts if its Python backend or the stub has waited for the other for some seconds, which happens when
    other processes use all cores.
    """
    return child.spec.name == TRITONSERVER and child.was_killed and child.num_crashes < MAX_START_ATTEMPTS


def _ended_child() -> int:
    """Return the pid of a child that has ended and is not reaped yet, or 0 if there is none."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return found.si_pid if found else 0
