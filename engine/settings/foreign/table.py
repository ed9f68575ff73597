"""All options and variables of other servers, and what those that are given here come to."""

from __future__ import annotations

import os
from collections.abc import Mapping

from engine.errors import ConfigError
from engine.settings.foreign import (
    fastdeploy,
    fastdeploy_variables,
    others,
    paddlenlp,
    rank_table,
    sglang,
    vllm,
    vllm_others,
)
from engine.settings.foreign.row import OptionRow

ROWS: tuple[OptionRow, ...] = (
    *(*paddlenlp.ROWS, *fastdeploy.ROWS, *fastdeploy_variables.ROWS, *vllm.ROWS),
    *(*vllm_others.ROWS, *rank_table.ROWS, *sglang.ROWS, *others.ROWS),
)
OPTIONS = {name: row for row in ROWS if row.is_option for name in row.names}
VARIABLES = {row.name: row for row in ROWS if not row.is_option}
WITHOUT_EFFECT = {name: row.why for name, row in VARIABLES.items() if row.why}


def dashed(name: str) -> str:
    """Return the option with dashes: several servers take underscores as well."""
    return name.replace("_", "-") if name.startswith("--") else name


def check_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError for every variable that asks for something which is not supported, a line each."""
    problems = []
    for name, row in VARIABLES.items():
        if row.instead and environ.get(name):
            try:
                row.meaning(name, environ[name], environ)
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def notes_on_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for every variable that is set and changes nothing here."""
    known = [f"{name} has no effect: {why}" for name, why in WITHOUT_EFFECT.items() if environ.get(name)]
    harmless = {name: row for name, row in VARIABLES.items() if row.harmless and environ.get(name)}
    notes = [note for name, row in harmless.items() for note in row.meaning(name, environ[name], environ).notes]
    return known + notes
