"""The table of docs/settings.md: `python -m engine.settings.table` prints it."""

from __future__ import annotations

import signal
from dataclasses import fields
from typing import Any

from engine.settings.config import Config
from engine.settings.setting import Setting


def markdown_table() -> str:
    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for f in fields(Config):
        s: Setting = f.metadata["setting"]
        if s.internal:
            continue
        old = f" (old name{'s' * (len(s.old) > 1)}: {', '.join(f'`{name}`' for name in s.old)})" if s.old else ""
        choices = f"; one of {', '.join(f'`{c}`' for c in s.choices)}" if s.choices else ""
        rows.append(f"| `{s.env}` | {_as_text(f.default)} | {s.doc}{choices}{old} |")
    return "\n".join(rows)


def _as_text(default: Any) -> str:
    if default is None or default == "":
        return ""
    if isinstance(default, bool):
        return f"`{int(default)}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    print(markdown_table())  # noqa: T201 - this is a command
