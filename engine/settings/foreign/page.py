"""Generator of docs/migrating.md: `python -m engine.settings.foreign.page` prints the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.settings.foreign.commands import COMMANDS, DEVIATIONS
from engine.settings.foreign.endpoints import ENDPOINTS
from engine.settings.foreign.row import SERVERS, OptionRow
from engine.settings.foreign.table import ROWS

INTRODUCTION = """\
# Migrating from other servers

This page lists the commands, options and environment variables of other servers and what they are here. `start_server`
answers from the same table: it takes an option that has a counterpart under its own name, says in a note when an option
changes nothing, and names the replacement of one that is refused. An environment variable that changes nothing is named
in a note at start. `python -m engine.settings.foreign.page` prints this page; [settings.md](settings.md) describes the
settings, [api.md](api.md) the requests."""
PATHS = """\
## Endpoints

These endpoints of other servers are not served. The error of such a path (404) says what there is instead."""
DEFAULTS = """\
## Deliberate differences

These defaults, names and behaviours of the other servers are different here."""


def page() -> str:
    parts = [INTRODUCTION]
    for server in SERVERS:
        parts.append(f"## {server}")
        commands = [(_code(c.theirs), _code(c.here), c.remark) for c in COMMANDS if c.server == server]
        parts.append(_table(("command", "here", "remark"), commands))
        options = [row for row in ROWS if server in row.servers]
        for kind, is_option in (("option", True), ("variable", False)):
            if cells := [_cells(row) for row in options if row.is_option == is_option]:
                parts.append(_table((kind, "here", "remark"), cells))
    paths: dict[tuple[str, str], list[str]] = {}
    for path, (server, instead) in ENDPOINTS.items():
        paths.setdefault((server, instead), []).append(_code(path))
    rows = [(", ".join(found), server, instead) for (server, instead), found in paths.items()]
    parts += [PATHS, _table(("endpoint", "server", "here"), rows)]
    deviations = [(d.what, d.theirs, d.here, d.reason) for d in DEVIATIONS]
    parts += [DEFAULTS, _table(("what", "there", "here", "reason"), deviations)]
    return "\n\n".join(parts) + "\n"


def _cells(row: OptionRow) -> Sequence[str]:
    names = ", ".join(map(_code, row.names))
    if row.setting:
        return names, _code(row.setting), row.remark
    if row.is_flag and row.harmless:
        return names, "no effect", f"{row.why}; {_code(row.name.replace('--', '--no-', 1))} is refused"
    if row.harmless:
        return names, f"only {', '.join(map(_code, row.harmless))}", row.instead
    if row.instead:
        return names, "refused", row.instead
    return names, "no effect" if row.why else "the same", row.why or row.remark.removeprefix("the same: ")


def _code(text: str) -> str:
    return f"`{text}`" if text and not text.startswith(("the same", "a clone")) else text or "none"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201 - this is a command
