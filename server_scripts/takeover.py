"""Takeover of processes that a killed supervisor has left running: whether they exist and whether they fit."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import astuple, fields
from pathlib import Path

from engine.exporting.files import CONFIG, MANIFEST
from engine.settings.config import Config
from server_scripts.child import ROOT
from server_scripts.run_dir import RunDir, ServerState

NOT_PRINTED = ("model_dir", "model_name", "served_model_name", "graph_dir", "api_key")


def find_orphans(run_dir: RunDir) -> ServerState | None:
    """Return the state of a server that was ready and whose supervisor is gone, or None.

    Processes of an unfinished start are not kept. The caller must hold the lock.
    """
    state = run_dir.read_state()
    is_left = state and state.phase == "ready" and any(process.is_alive for process in state.processes)
    return state if is_left else None


def setting_fingerprints(config: Config) -> dict[str, str]:
    """Return a fingerprint of each setting that is neither secret nor part of the model."""
    known = {f.metadata["setting"].env: getattr(config, f.name) for f in fields(config) if f.name not in NOT_PRINTED}
    return {name: hashlib.sha256(repr(value).encode()).hexdigest()[:12] for name, value in known.items()}


def fingerprint(config: Config, graph_dir: Path, served_name: str) -> str:
    """Return a fingerprint that is equal for starts with the same processes.

    It reveals nothing about the settings, some of which are secret.
    """
    made_of = (astuple(config), str(graph_dir), served_name, sys.executable, str(ROOT))
    files = [graph_dir / name for name in (MANIFEST, CONFIG)]
    model = b"".join(path.read_bytes() for path in files if path.is_file())  # a scheduler has no model
    return hashlib.sha256(repr(made_of).encode() + model).hexdigest()
