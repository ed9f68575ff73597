"""The end of a server, in order: who takes requests first, the engine when nobody needs it any more."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence

from server_scripts.child import Child
from server_scripts.processes import ENGINE, TRITONSERVER
from server_scripts.run_dir import Process, children_of
from server_scripts.supervisor import Supervisor

log = logging.getLogger("supervisor")

HEAD_START_S = 0.5  # of the gateway, before tritonserver refuses new requests
STOP_MARGIN_S = 10.0  # beyond the drain timeout, for tritonserver to unload
STOP_WHILE_STARTING_S = 5.0  # there are no requests yet
ASK_ENGINE_EVERY_S = 0.5
IDLE_TRITON_S = 5.0  # for its own unloading, which takes two or three
ENGINE_STOP_S = 10.0
KILL_S = 5.0


def stop_timeout_s(drain_timeout_s: float) -> float:
    """The longest that `shut_down` takes."""
    return drain_timeout_s + STOP_MARGIN_S + ENGINE_STOP_S + 3 * KILL_S


def shut_down(supervisor: Supervisor) -> None:
    """Gateway and tritonserver let running requests end for the drain timeout, at the same time."""
    drain_s = supervisor.config.drain_timeout_s + STOP_MARGIN_S
    deadline = time.monotonic() + (drain_s if supervisor.state.phase == "ready" else STOP_WHILE_STARTING_S)
    supervisor.monitor.stop()
    supervisor.set_phase("stopping")
    engine = [child for child in supervisor.children if child.spec.name == ENGINE]
    triton = [child for child in supervisor.children if child.spec.name == TRITONSERVER]
    front = [child for child in supervisor.children if child.spec.name not in (ENGINE, TRITONSERVER)]
    _ask(supervisor, front, time.monotonic() + HEAD_START_S)
    _ask(supervisor, triton, time.monotonic())
    _wait(supervisor, front, deadline)
    _wait_for_triton(supervisor, triton, deadline)
    _kill(supervisor, front + triton)
    _ask(supervisor, engine, time.monotonic() + ENGINE_STOP_S)
    _kill(supervisor, engine)
    _kill_adopted(supervisor)
    supervisor.run_dir.clean_up()
    log.info("stopped")


def _ask(supervisor: Supervisor, children: Sequence[Child], deadline: float) -> None:
    for child in children:
        child.signal(signal.SIGTERM)
    _wait(supervisor, children, deadline)


def _wait(supervisor: Supervisor, children: Sequence[Child], deadline: float) -> None:
    """Until they have ended, the deadline, or a second stop signal."""
    while any(c.process for c in children) and supervisor.num_stop_signals < 2 and time.monotonic() < deadline:
        supervisor.sleep(0.05)
        supervisor.reap()
        supervisor.every_turn()


def _wait_for_triton(supervisor: Supervisor, triton: Sequence[Child], deadline: float) -> None:
    """Triton 2.51 may count a request for ever whose client left at its very end, and never unload its model. So it
    is waited for while the engine has requests, and a little longer."""
    now = last_busy = time.monotonic()
    while any(child.process for child in triton) and supervisor.num_stop_signals < 2 and now < deadline:
        if supervisor.monitor.probe.num_open():
            last_busy = now
        if now > last_busy + IDLE_TRITON_S:
            return
        _wait(supervisor, triton, now + ASK_ENGINE_EVERY_S)
        now = time.monotonic()


def _kill(supervisor: Supervisor, children: Sequence[Child]) -> None:
    late = [child for child in children if child.process]
    deadline = time.monotonic() + KILL_S
    for child in late:
        log.warning("%s has not ended in time, killing it", child.spec.name)
        child.kill()
    while any(child.process for child in late) and time.monotonic() < deadline:
        time.sleep(0.01)
        supervisor.reap()


def _kill_adopted(supervisor: Supervisor) -> None:
    """Those whose parent was one of our children and has ended without them."""
    deadline = time.monotonic() + KILL_S
    while (pids := children_of(os.getpid())) and time.monotonic() < deadline:
        for process in filter(None, (Process.of("adopted", pid) for pid in pids)):
            process.kill()
        time.sleep(0.01)
        supervisor.reap()
