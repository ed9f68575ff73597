"""Reload: changes the model while the server keeps running.

`server_scripts.reload_client` requests it.

New requests wait in the gateway while running ones finish; then the engine and tritonserver are restarted with the new
model. The old model finishes what it has started or ends it with an error, so no answer contains tokens of both. If the
new model does not become ready, the old one is restored.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from engine.errors import SetupError
from engine.settings.processes import STOPPING_FILE
from engine.settings.served import SERVED_FILE, Served, ServedModel
from engine.settings.stopping import Stopping
from server_scripts.child import Child, ChildSpec
from server_scripts.probe import OPEN_TIMEOUT_S, ProbeError
from server_scripts.processes import ENGINE, TRITONSERVER, all_specs, kind_of
from server_scripts.report import StartProgress
from server_scripts.run_dir import RunDir
from server_scripts.shutdown import ENGINE_STOP_S, STOP_MARGIN_S, ask_to_end, kill_late
from server_scripts.supervisor import TURN_WHILE_STARTING_S, StartFailed, Supervisor

log = logging.getLogger("supervisor")

REQUEST_FILE, STATUS_FILE = "reload.wanted", "reload.said"
ASK_EVERY_S = 0.2
NUM_IDLE = 2  # idle probes in a row that are required, because a request may be on its way to the model
WHY = "the model is being reloaded, which waits at most DRAIN_TIMEOUT for running requests"


@dataclass(frozen=True)
class ReloadRequest:
    """Request to load an exported model. `id` identifies the command that asks."""

    id: str
    graph_dir: str
    label: str
    fingerprint: str


@dataclass
class ReloadStatus:
    """Progress of a reload for the command that asked, and at the end its exit status.

    A failure to write it is ignored.
    """

    id: str
    lines: list[str] = field(default_factory=list)
    exit_status: int | None = None

    def write(self, run_dir: RunDir) -> None:
        """Write the status file."""
        with contextlib.suppress(OSError):
            run_dir.write(STATUS_FILE, json.dumps(asdict(self)))


@dataclass(frozen=True)
class ReloadTarget:
    """Model to serve, with the specs of all children."""

    id: str
    label: str
    fingerprint: str
    specs: Sequence[ChildSpec]  # specs of all children

    @property
    def served(self) -> Served:
        """Return the entry of the file of the served model for this model."""
        return Served(self.id, self.label, graph_dir=self.specs[0].env.get("GRAPH_DIR", ""))


def take_reload_request(run_dir: RunDir) -> ReloadRequest | None:
    """Return the pending request and remove its file, or return None."""
    path = run_dir.path / REQUEST_FILE
    try:
        wanted = ReloadRequest(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    path.unlink()
    return wanted


def release(run_dir: RunDir, served: Served | None = None) -> None:
    """Let waiting requests continue with the model `served`, or else with the one that is served."""
    if (current := ServedModel(run_dir.path).now()).is_changing:
        try:
            run_dir.write(SERVED_FILE, replace(served or current, is_changing=False).text())
        except OSError as error:
            log.error("%s could not be written: %s", SERVED_FILE, error)
            (run_dir.path / SERVED_FILE).unlink()


def change_model(supervisor: Supervisor, wanted: ReloadRequest) -> None:
    """Carry out a reload.

    Return when the server serves again, with the new model or the old one, or is asked to stop.
    """
    run_dir, state, status = supervisor.run_dir, supervisor.state, ReloadStatus(wanted.id)

    def report(text: str) -> None:
        log.info("changing the model: %s", text)
        status.lines.append(text)
        status.write(run_dir)

    old_specs, is_changed = [child.spec for child in supervisor.children], False
    old = ReloadTarget(ServedModel(run_dir.path).now().id, state.model, state.fingerprint, old_specs)
    try:
        specs = all_specs(supervisor.config, Path(wanted.graph_dir), wanted.label, run_dir)
        new = ReloadTarget(uuid.uuid4().hex, wanted.label, wanted.fingerprint, specs)
        is_changed = drain(supervisor, old, new, report) and restart_with(supervisor, old, new, report)
    except (SetupError, OSError) as error:  # raised before any process was ended
        report(f"failed: {error}")
    finally:
        release(run_dir, new.served if is_changed else old.served)
        status.exit_status = 0 if is_changed else 1
        status.write(run_dir)


def drain(supervisor: Supervisor, old: ReloadTarget, new: ReloadTarget, report: Callable[[str], None]) -> bool:
    """Make new requests wait and let running ones finish. Return False if the server is asked to stop.

    Requests that wait are read by the chat template of the new model, which will answer them.
    """
    run_dir, drain_s = supervisor.run_dir, supervisor.config.drain_timeout_s
    end_at = time.monotonic() + drain_s
    waiting = replace(old.served, is_changing=True, graph_dir=new.served.graph_dir)
    run_dir.write(SERVED_FILE, waiting.text())
    run_dir.write(STOPPING_FILE, Stopping(end_at, WHY, end_at).text())
    supervisor.set_phase("changing")  # in this phase another supervisor cannot take over
    report(f"new requests wait; running ones may finish within {drain_s:g} s")
    num_idle = 0
    while num_idle < NUM_IDLE and time.monotonic() < end_at + STOP_MARGIN_S and not supervisor.num_stop_signals:
        supervisor.turn(ASK_EVERY_S)
        try:
            num_idle = 0 if supervisor.monitor.probe.state(OPEN_TIMEOUT_S)["num_open"] else num_idle + 1
        except ProbeError:
            num_idle = 0
    if supervisor.num_stop_signals:
        supervisor.set_phase("ready")  # the shutdown waits for the running requests
        return False
    return True


def restart_with(supervisor: Supervisor, old: ReloadTarget, new: ReloadTarget, report: Callable[[str], None]) -> bool:
    """Restart the engine and tritonserver with the new model.

    Return False if it did not become ready and the old one was restored, or if the server is asked to stop.
    """
    report(f"ending {old.label}")
    end_model(supervisor)
    progress = StartProgress(supervisor, report)
    try:
        # Written now, so that a part of the old model's answer is never continued by the new model.
        supervisor.run_dir.write(SERVED_FILE, replace(new.served, is_changing=True).text())
        install(supervisor, new)
        supervisor.bring_up(progress)
        if supervisor.num_stop_signals:
            return False
        report(f"{new.label} is ready")
        return True
    except StartFailed as failure:
        progress.failed(failure)
    except OSError as error:
        report(f"failed: {error}")
    report(f"restoring {old.label}")
    end_model(supervisor)
    install(supervisor, old)
    restore_old_model(supervisor, old)
    if supervisor.seen.checked:
        report(f"{old.label} is ready again")
    return False


def end_model(supervisor: Supervisor) -> None:
    """End the engine and tritonserver, which are idle."""
    supervisor.monitor.stop()
    supervisor.set_phase("ending the model")
    children = [child for child in supervisor.children if kind_of(child.spec.name) in (ENGINE, TRITONSERVER)]
    ask_to_end(supervisor, children, time.monotonic() + ENGINE_STOP_S)
    kill_late(supervisor, children)
    supervisor.run_dir.remove_shared_memory()


def install(supervisor: Supervisor, model: ReloadTarget) -> None:
    """Replace the specs of all children by those of `model`. Running gateways continue."""
    for index, spec in enumerate(model.specs):
        child = supervisor.children[index]
        if kind_of(spec.name) in (ENGINE, TRITONSERVER):
            supervisor.children[index] = Child(spec)
        else:
            child.spec = spec
    supervisor.state.model, supervisor.state.fingerprint = model.label, model.fingerprint
    probe = supervisor.monitor.probe
    supervisor.watch_with(supervisor.monitor.again(probe.check_model))  # a real request through the ports would wait


def restore_old_model(supervisor: Supervisor, old: ReloadTarget) -> None:
    """Restart the old model as after a crash, and wait for it no longer than for a start."""
    with contextlib.suppress(OSError):  # partially received answers cannot be continued without it
        supervisor.run_dir.write(SERVED_FILE, replace(old.served, is_changing=True).text())
    supervisor.set_phase("changing")
    supervisor.start_all()
    deadline = time.monotonic() + supervisor.config.start_timeout_s
    while not (supervisor.seen.checked or supervisor.num_stop_signals) and time.monotonic() < deadline:
        supervisor.turn(TURN_WHILE_STARTING_S)
    if not supervisor.num_stop_signals:
        supervisor.set_phase("ready")
