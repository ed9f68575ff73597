"""What a supervisor that was killed has left running, and whether another one may take it over. Ends nothing."""

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
    """Of a server that was ready; what was only starting is not worth keeping. To be asked by who has the lock."""
    state = run_dir.read_state()
    is_left = state and state.phase == "ready" and any(process.is_alive for process in state.processes)
    return state if is_left else None


def setting_fingerprints(config: Config) -> dict[str, str]:
    """Of every setting that is neither a secret nor the model's."""
    known = {f.metadata["setting"].env: getattr(config, f.name) for f in fields(config) if f.name not in NOT_PRINTED}
    return {name: hashlib.sha256(repr(value).encode()).hexdigest()[:12] for name, value in known.items()}


def fingerprint(config: Config, graph_dir: Path, served_name: str) -> str:
    """Equal where a start would make the same processes. It tells nothing of the settings, some of which are secret."""
    made_of = (astuple(config), str(graph_dir), served_name, sys.executable, str(ROOT))
    model = b"".join((graph_dir / name).read_bytes() for name in (MANIFEST, CONFIG))
    return hashlib.sha256(repr(made_of).encode() + model).hexdigest()
