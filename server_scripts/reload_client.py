"""Command `start_server --reload`: asks the running server to load another model, and reports the progress.

The model is exported in this process, where the user sees errors. The supervisor does the rest
(server_scripts/reload.py), also if this process ends.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict

from engine.errors import ConfigError, SetupError
from engine.file_lock import file_lock
from engine.settings.config import Config
from server_scripts import takeover
from server_scripts.model_source import export_if_needed, fetch_draft_model, find_source
from server_scripts.reload import REQUEST_FILE, STATUS_FILE, ReloadRequest, ReloadStatus
from server_scripts.run_dir import Process, RunDir, ServerState

LOCK_FILE = "reload.lock"
POLL_S = 0.1


class ReloadError(SetupError):
    """The model cannot be reloaded; the message gives the reason."""


def reload(model_name: str, report: Callable[[str], None]) -> int:
    """Return 0 if the server has loaded the model and 1 if that failed. Raise SetupError if it was not attempted."""
    config = Config.from_env()
    if config.mp_nnode > 1:
        text = "a model on several machines is changed by stop_server and start_server on each of them"
        raise ConfigError(f"MP_NNODE is {config.mp_nnode}, --reload is for one machine: {text}")
    if not config.run_path.exists():
        raise ReloadError(f"no server runs in RUN_DIR, which is {config.run_path}")
    run_dir = RunDir(config.run_path)
    with file_lock(run_dir.path / LOCK_FILE, lambda: report("waiting for another --reload to end")):
        supervisor = running(run_dir, config).supervisor
        source = find_source(config, model_name or config.model_name, report)
        report(f"model {source.path}")
        fetch_draft_model(config, report)
        graph_dir = export_if_needed(config, source, report)
        fingerprint = takeover.fingerprint(config, graph_dir, source.label)
        wanted = ReloadRequest(uuid.uuid4().hex, str(graph_dir), source.label, fingerprint)
        run_dir.write(REQUEST_FILE, json.dumps(asdict(wanted)))
        return follow(run_dir, supervisor, wanted.id, report)


def running(run_dir: RunDir, config: Config) -> ServerState:
    """Return the state of the server.

    Raise ReloadError if its model cannot be reloaded now, and ConfigError if other settings differ.
    """
    state = run_dir.read_state()
    if state is None or not state.supervisor.is_alive:
        raise ReloadError(f"no server runs in RUN_DIR, which is {run_dir.path}")
    if state.phase != "ready":
        raise ReloadError(f"the server is not ready, it is {state.phase}")
    if others := [
        name for name, text in takeover.setting_fingerprints(config).items() if state.settings.get(name) != text
    ]:
        is_changed = "has" if len(others) == 1 else "have"
        text = f"{is_changed} changed since the server was started, and --reload changes the model only"
        raise ConfigError(f"{', '.join(others)} {text}")
    return state


def follow(run_dir: RunDir, supervisor: Process, wanted_id: str, report: Callable[[str], None]) -> int:
    """Report the progress of a reload until its end and return its exit status.

    Raise ReloadError if the server ends.
    """
    num_reported = 0
    while True:
        is_alive = supervisor.is_alive  # read before the status, so that the last status is not missed
        status = read_status(run_dir, wanted_id)
        for line in status.lines[num_reported:]:
            report(line)
        num_reported = len(status.lines)
        if status.exit_status is not None:
            return status.exit_status
        if not is_alive:
            raise ReloadError("the server has ended meanwhile")
        time.sleep(POLL_S)


def read_status(run_dir: RunDir, wanted_id: str) -> ReloadStatus:
    """Return the status of a reload, which is empty before the supervisor has written it."""
    try:
        status = ReloadStatus(**json.loads((run_dir.path / STATUS_FILE).read_text()))
    except FileNotFoundError:
        return ReloadStatus(wanted_id)
    return status if status.id == wanted_id else ReloadStatus(wanted_id)
