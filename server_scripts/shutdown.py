"""Shutdown of a server, in order: readiness, the gateways, then tritonserver, the engine and the health port together.

An idle tritonserver has nothing to save and is killed, because its own shutdown takes two seconds: it sleeps for one
before it unloads a model and then checks once a second. If it were asked to end earlier it would cancel every stream
without a final response, still wait for its exit timeout, and corrupt its heap at the end.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence

from engine.settings.config import Config
from engine.settings.processes import STOPPING_FILE
from engine.settings.stopping import Stopping
from server_scripts.child import Child
from server_scripts.processes import ENGINE, HEALTH, TRITONSERVER, kind_of
from server_scripts.run_dir import Process, children_of
from server_scripts.supervisor import Supervisor

log = logging.getLogger("supervisor")

STOP_MARGIN_S = 10.0  # added to the drain timeout, for the last answers to reach their clients
STOP_WHILE_STARTING_S = 5.0  # shorter because there are no requests yet
ASK_MODEL_EVERY_S = 0.2
BEGIN_PULLS_S = 1.5  # other replicas ask within this time for blocks of requests that were handed over
UNLOAD_S = 5.0  # tritonserver takes two or three seconds to unload the model
ENGINE_STOP_S = 10.0
KILL_S = 5.0


def stop_timeout_s(config: Config) -> float:
    """Return the longest time in seconds that `shut_down` takes."""
    return config.drain_delay_s + config.drain_timeout_s + STOP_MARGIN_S + UNLOAD_S + ENGINE_STOP_S + 3 * KILL_S


def shut_down(supervisor: Supervisor) -> None:
    """Let running requests finish within the drain timeout, in the gateways and the model at once, then end all
    processes. If that fails, kill them.
    """
    try:
        _end_in_order(supervisor)
    except BaseException:
        kill_late(supervisor, supervisor.children)
        raise
    finally:
        _kill_adopted(supervisor)
        supervisor.run_dir.clean_up()
    log.info("stopped")


def _end_in_order(supervisor: Supervisor) -> None:
    config, was_ready = supervisor.config, supervisor.state.phase == "ready"
    refuse_at = time.monotonic() + (config.drain_delay_s if was_ready else 0.0)
    deadline = refuse_at + (config.drain_timeout_s + STOP_MARGIN_S if was_ready else STOP_WHILE_STARTING_S)
    supervisor.monitor.stop()
    supervisor.set_phase("stopping")
    _announce(supervisor, refuse_at)
    engine = [child for child in supervisor.children if kind_of(child.spec.name) in (ENGINE, HEALTH)]
    triton = [child for child in supervisor.children if child.spec.name == TRITONSERVER]
    front = [child for child in supervisor.children if kind_of(child.spec.name) not in (ENGINE, HEALTH, TRITONSERVER)]
    ask_to_end(supervisor, front, deadline)
    is_idle = _wait_for_answers(supervisor, triton, deadline)
    if is_idle and was_ready and config.replica_cache_port:
        _wait_for_pulls(supervisor, triton, deadline)
    if is_idle and not config.otlp_endpoint:
        kill_late(supervisor, front)
        for child in triton:
            child.kill()
    else:  # unloading the model ends running requests and sends the last trace spans
        ask_to_end(supervisor, triton, min(deadline, time.monotonic()) + UNLOAD_S)
        kill_late(supervisor, front + triton)
    ask_to_end(supervisor, engine, time.monotonic() + ENGINE_STOP_S)
    kill_late(supervisor, engine)


def _announce(supervisor: Supervisor, refuse_at: float) -> None:
    """Announce the shutdown: the model is not ready from now on, accepts requests until `refuse_at`, and ends them one
    drain timeout later.
    """
    try:
        supervisor.run_dir.write(STOPPING_FILE, Stopping(refuse_at).text())
    except OSError as error:
        log.error("%s could not be written: %s", STOPPING_FILE, error)
    _wait(supervisor, supervisor.children, refuse_at)


def ask_to_end(supervisor: Supervisor, children: Sequence[Child], deadline: float) -> None:
    """Send SIGTERM to the children and wait until they have ended or `deadline` has passed."""
    for child in children:
        child.signal(signal.SIGTERM)
    _wait(supervisor, children, deadline)


def _wait(supervisor: Supervisor, children: Sequence[Child], deadline: float) -> None:
    """Wait until the children have ended, the deadline has passed, or a second stop signal arrives."""
    while any(c.process for c in children) and supervisor.num_stop_signals < 2 and time.monotonic() < deadline:
        supervisor.sleep(0.05)
        supervisor.reap()
        supervisor.every_turn()


def _wait_for_answers(supervisor: Supervisor, triton: Sequence[Child], deadline: float) -> bool:
    """Wait until the model has ended every request; the gateway has waited for its own. Return False if it has not."""
    while any(child.process for child in triton) and supervisor.num_stop_signals < 2 and time.monotonic() < deadline:
        if not supervisor.monitor.probe.num_open():
            return True
        _wait(supervisor, triton, time.monotonic() + ASK_MODEL_EVERY_S)
    return False


def _wait_for_pulls(supervisor: Supervisor, triton: Sequence[Child], deadline: float) -> None:
    """Wait until other replicas have pulled the blocks of the requests that were handed over to them."""
    _wait(supervisor, triton, min(deadline, time.monotonic() + BEGIN_PULLS_S))
    while any(c.process for c in triton) and supervisor.num_stop_signals < 2 and time.monotonic() < deadline:
        if not supervisor.monitor.probe.num_blocks_held():
            return
        _wait(supervisor, triton, time.monotonic() + ASK_MODEL_EVERY_S)


def kill_late(supervisor: Supervisor, children: Sequence[Child]) -> None:
    """Kill the children that are still running."""
    late = [child for child in children if child.process]
    deadline = time.monotonic() + KILL_S
    for child in late:
        log.warning("%s has not ended in time, killing it", child.spec.name)
        child.kill()
    while any(child.process for child in late) and time.monotonic() < deadline:
        time.sleep(0.01)
        supervisor.reap()


def _kill_adopted(supervisor: Supervisor) -> None:
    """Kill processes that this one has adopted because their parent, a child, has ended without them."""
    deadline = time.monotonic() + KILL_S
    while (pids := children_of(os.getpid())) and time.monotonic() < deadline:
        for process in filter(None, (Process.of("adopted", pid) for pid in pids)):
            process.kill()
        time.sleep(0.01)
        supervisor.reap()
