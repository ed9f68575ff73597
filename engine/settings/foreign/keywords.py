"""Settings that a program gives by name, `LLM(path, tensor_parallel_size=2)`, under the names of other servers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from engine.settings.config import Config
from engine.settings.foreign.table import OPTIONS

log = logging.getLogger(__name__)
FIELDS = {f.metadata["setting"].env: f.name for f in fields(Config)}


def own_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same settings by the names of `Config`'s fields. A name that no server has is left as it is. Raises
    ConfigError for what is not supported."""
    rows = {name: OPTIONS.get(f"--{name.replace('_', '-')}") for name in given.keys() - {*FIELDS.values()}}
    own = {name: json.dumps(value) if isinstance(value, Mapping) else value for name, value in given.items()}
    own = {name: value for name, value in own.items() if not rows.get(name)}
    environ = {env: str(own[name]) for env, name in FIELDS.items() if name in own}
    for name, row in sorted(rows.items(), key=lambda item: bool(item[1] and item[1].read)):  # readers see the others
        value = given[name]
        if row is None or value is None or (row.is_flag and row.is_always_refused and not value):
            continue
        meaning = row.meaning(name, _as_text(value), environ)
        own |= {FIELDS[env]: text for env, text in meaning.settings.items()}
        environ |= meaning.settings
        for note in meaning.notes:
            log.info("%s", note)
    return own


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return json.dumps(value) if isinstance(value, Mapping | list) else str(value)
