"""Entry points of the installed commands. Ctrl-C while a command's modules are imported ends it without a traceback."""

from __future__ import annotations

import importlib
import signal
from types import ModuleType


def start_server() -> int:
    """Run `start_server`, which handles signals itself once it has read its arguments."""
    return _imported("start", restores_handler=False).main()


def stop_server() -> int:
    """Run `stop_server`, which handles KeyboardInterrupt."""
    return _imported("stop").main()


def run_batch() -> int:
    """Run `run_batch`, which handles KeyboardInterrupt."""
    return _imported("run_batch").main()


def _imported(module: str, restores_handler: bool = True) -> ModuleType:
    """Return a module of this package, during whose import SIGINT has the system's handler."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # a background job of a shell ignores the signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    found = importlib.import_module(f"server_scripts.{module}")
    if restores_handler:
        signal.signal(signal.SIGINT, handler)
    return found
