"""Keeps the processes of a server alive. Knows processes and answers, not requests.

It is the parent of every process of the server, also of those whose own parent has died, so nothing can get lost. When
it dies the others go on, and the next one takes them over, no longer as its children.
`server_scripts.serve` runs it; `server_scripts.shutdown` ends it.
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
from engine.settings.processes import ENGINE_FAILED_FILE, STOPPING_FILE
from server_scripts import health
from server_scripts.child import Child, ChildSpec
from server_scripts.health import HealthMonitor, Observation
from server_scripts.processes import ENGINE, TRITONSERVER
from server_scripts.run_dir import Process, RunDir, ServerState

log = logging.getLogger("supervisor")

PR_SET_CHILD_SUBREAPER = 36
TURN_S = 0.2  # until a death is noticed that no signal tells: of the stub, which is a child of tritonserver
TURN_WHILE_STARTING_S = 0.05  # somebody waits for it


class StartFailed(Exception):
    """The server will not become ready; the message says why. `child`: whose log says more."""

    def __init__(self, message: str, child: Child | None = None):
        super().__init__(message)
        self.child = child


@dataclass
class Supervisor:
    specs: Sequence[ChildSpec]
    run_dir: RunDir
    state: ServerState
    config: Config
    monitor: HealthMonitor
    every_turn: Callable[[], None] = lambda: None
    children: list[Child] = field(init=False)
    seen: Observation = field(init=False, default=Observation())  # the last one that was acted on
    stop_signal: int = field(init=False, default=0)  # the last one
    num_stop_signals: int = field(init=False, default=0)  # the first asks for an orderly end, the second insists

    def __post_init__(self) -> None:
        self.children = [Child(spec) for spec in self.specs]
        self._signal_pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def adopt_and_listen(self) -> None:
        """From now on orphans of our children become ours, so that they can be ended and do not stay behind as
        zombies, and a signal ends `sleep`, also one that comes just before it."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.set_wakeup_fd(self._signal_pipe[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a signal without a handler wakes nobody
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_stop_signal)

    def _on_stop_signal(self, number: int, _frame: object) -> None:
        self.stop_signal = number
        self.num_stop_signals += 1

    def sleep(self, seconds: float) -> None:
        """Until something happens to a child or somebody asks for the end, but no longer."""
        if select.select(self._signal_pipe[:1], [], [], seconds)[0]:
            os.read(self._signal_pipe[0], 1 << 16)

    def take_over(self, processes: Sequence[Process]) -> None:
        """What an earlier supervisor has left running. It serves already: what is missing is started as after a crash,
        and nothing can make this start fail."""
        for child in self.children:
            child.take_over(processes)
        self.state.phase = "ready"

    def bring_up(self, tell: Callable[[], None]) -> None:
        """Returns when the server is ready or asked to stop. `tell` is called all the time for those who wait."""
        started, is_new = time.monotonic(), self.state.phase != "ready"
        self.start_all()
        if is_new and (missing := next((child for child in self.children if child.process is None), None)):
            raise StartFailed(f"{missing.spec.name} {missing.last_words}", missing)
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
            if self.run_dir.read_state() != self.state:  # stop_server reads it there
                raise StartFailed(f"the state file in {self.run_dir.path} could not be written, see console.log")

    def watch_with(self, monitor: HealthMonitor) -> None:
        """From now on, as if nothing had been seen."""
        self.monitor, self.seen = monitor, Observation()

    def start_all(self) -> None:
        """What does not run yet."""
        for name in (ENGINE_FAILED_FILE, STOPPING_FILE):
            (self.run_dir.path / name).unlink(missing_ok=True)
        for child in self.children:
            if child.process is None:
                self._start(child)
        self.monitor.start()

    def turn(self, sleep_s: float) -> None:
        """Sleeps until there is news, then does once all that is due."""
        self.sleep(sleep_s)
        self.reap()
        self._act_on_observation()
        self._watch_triton()
        self._end_stopped()
        self._start_what_is_due()
        self.every_turn()

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
        """Takes note of every child that has ended. Adopted ones are only reaped."""
        while pid := _ended_child():
            child = next((c for c in self.children if c.process and c.process.pid == pid), None)
            if child:
                child.kill()  # what it has left behind; it is not reaped yet, so its number is nobody else's
            _, status = os.waitpid(pid, 0)
            if child:
                self._note_end(child, status)
        for child in self.children:
            if child.process and not child.is_ours and not child.process.is_alive:
                child.kill()
                self._note_end(child, None)

    def _note_end(self, child: Child, status: int | None) -> None:
        is_crash = child.has_ended(status)
        if not self.num_stop_signals and self.state.phase not in ("stopping", "ending the model"):
            self._act_on_end(child, is_crash)

    def _act_on_end(self, child: Child, is_crash: bool) -> None:
        log.error("%s %s", child.spec.name, child.last_words)
        if self.state.phase == "starting" and is_crash:
            raise StartFailed(f"{child.spec.name} {child.last_words}", child)
        if child.spec.name == TRITONSERVER:
            self.run_dir.remove_shared_memory()
        if child.restart_at is None:
            self._give_up(child)
        self._write_state()

    def _give_up(self, child: Child) -> None:
        """The reason goes to clients, so it says nothing that is only in the log."""
        reason = f"the {child.spec.name} {child.last_words}, {child.num_crashes} times in a row"
        log.error("%s; it is not started again", reason)
        try:
            self.run_dir.write(ENGINE_FAILED_FILE, reason)
        except OSError as error:
            log.error("%s could not be written: %s", ENGINE_FAILED_FILE, error)

    def _start_what_is_due(self) -> None:
        for child in self.children:
            if child.restart_at is not None and time.monotonic() >= child.restart_at and not self.num_stop_signals:
                self._start(child)

    def _start(self, child: Child) -> None:
        child.start()
        if child.process is None:
            log.error("%s %s", child.spec.name, child.last_words)
            return
        log.info("started %s, pid %d", child.spec.name, child.process.pid)
        self._write_state()

    @property
    def is_triton_coming_back(self) -> bool:
        """True while a tritonserver that was restarted has not answered yet."""
        triton = self.named(TRITONSERVER)
        return bool(self.state.phase == "ready" and triton and triton.process and triton.healthy_since is None)

    def _watch_triton(self) -> None:
        """Triton 2.51 does not notice that its stub has died: every request would fail and the server look healthy."""
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
        """Of several that share a port none can be asked whether it answers, and clients of one that is stopped would
        wait for ever."""
        for child in self.children:
            if child.is_stopped_for_long():
                self._end(child, "has been stopped for too long")

    def _act_on_observation(self) -> None:
        seen = self.monitor.latest
        if seen is self.seen:
            return
        self.seen = seen
        triton, engine = self.named(TRITONSERVER), self.named(ENGINE)
        health.note_healthy(seen, engine, [child for child in self.children if child is not engine])
        if triton is None or not triton.was_running(seen.at):
            return
        has_ranks = engine and engine.healthy_since and self.config.mp_num > self.config.mp_nnode
        for child in (triton, engine if has_ranks else None):
            if seen.state is not None:
                self._find_helpers(child)
        if self.state.phase == "ready":
            self._end(triton, health.why_triton_must_end(seen, triton, self.config))
        if engine and engine.process:
            self._end(engine, health.why_engine_must_end(seen, engine, triton, self.config))

    def _end(self, child: Child, reason: str) -> None:
        if reason:
            log.error("%s %s; ending it", child.spec.name, reason)
            child.kill()


def _ended_child() -> int:
    """pid of a child that has ended and is not reaped yet; 0 when there is none."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return found.si_pid if found else 0
