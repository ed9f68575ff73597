"""One form of log line for every process of the server, and of texts for a terminal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TextIO
from unicodedata import category

Report = Callable[[str], None]  # receives sentences on the progress of a long operation
KEPT = "\n\t\u200c\u200d"


def configure(level: str, stream: TextIO | None = None, process: str = "") -> None:
    """Configure logging. `level` is the value of LOG_LEVEL, `process` distinguishes processes that share a file, and
    `stream` is standard error by default.
    """
    who = f" {process}" if process else ""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter(f"%(asctime)s %(levelname)s{who} %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def printable(text: str) -> str:
    """Return the text with control characters escaped, because names from clients and files must not control a
    terminal. Line breaks, and the spaces and joiners of scripts and emoji, are kept."""
    return "".join(c if c.isprintable() or c in KEPT or category(c) == "Zs" else repr(c)[1:-1] for c in text)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Format a record. Further lines of it are indented, so that only log lines begin like one."""
        return printable(super().format(record)).replace("\n", "\n    ")
