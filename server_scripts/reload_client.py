"""`start_server --reload`: has the running server change its model, and says how it goes.

The model is exported here, where somebody reads why it cannot be. The rest is the supervisor's, see `swap`, and goes on
when this process ends."""

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
from server_scripts.model_source import export_if_needed, find_source
from server_scripts.reload import REQUEST_FILE, STATUS_FILE, ReloadRequest, ReloadStatus
from server_scripts.run_dir import Process, RunDir, ServerState

LOCK_FILE = "reload.lock"
POLL_S = 0.1


class ReloadError(SetupError):
    """The model cannot be changed; the message says why."""


def reload(model_name: str, report: Callable[[str], None]) -> int:
    """0 when the server has changed to the model, 1 when it has not. Raises SetupError when that was not tried."""
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
        graph_dir = export_if_needed(config, source, report)
        fingerprint = takeover.fingerprint(config, graph_dir, source.label)
        wanted = ReloadRequest(uuid.uuid4().hex, str(graph_dir), source.label, fingerprint)
        run_dir.write(REQUEST_FILE, json.dumps(asdict(wanted)))
        return follow(run_dir, supervisor, wanted.id, report)


def running(run_dir: RunDir, config: Config) -> ServerState:
    """The server whose model can be changed."""
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
    num_told = 0
    while True:
        is_alive = supervisor.is_alive  # before the last look
        said = read_status(run_dir, wanted_id)
        for line in said.lines[num_told:]:
            report(line)
        num_told = len(said.lines)
        if said.status is not None:
            return said.status
        if not is_alive:
            raise ReloadError("the server has ended meanwhile")
        time.sleep(POLL_S)


def read_status(run_dir: RunDir, wanted_id: str) -> ReloadStatus:
    try:
        said = ReloadStatus(**json.loads((run_dir.path / STATUS_FILE).read_text()))
    except FileNotFoundError:
        return ReloadStatus(wanted_id)
    return said if said.id == wanted_id else ReloadStatus(wanted_id)
