"""One form of log line for every process of the server."""

from __future__ import annotations

import logging
from typing import TextIO


def configure(level: str, stream: TextIO | None = None, process: str = "") -> None:
    """`level` is LOG_LEVEL's value. `process` tells apart those that share a file. Without `stream`: standard error."""
    who = f" {process}" if process else ""
    logging.basicConfig(level=level, stream=stream, format=f"%(asctime)s %(levelname)s{who} %(name)s: %(message)s")
