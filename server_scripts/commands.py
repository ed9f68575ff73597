"""Entry points of the installed commands. Ctrl-C while a command's modules are imported ends it without a traceback."""

from __future__ import annotations

import importlib
import signal
from typing import Any


def start_server() -> int:
    """Run `start_server`, which handles signals itself once it has read its arguments."""
    main, _ = _imported("start")
    return main()


def stop_server() -> int:
    """Run `stop_server`, which handles KeyboardInterrupt."""
    main, handler = _imported("stop")
    signal.signal(signal.SIGINT, handler)
    return main()


def run_batch() -> int:
    """Run `run_batch`, which handles KeyboardInterrupt."""
    main, handler = _imported("run_batch")
    signal.signal(signal.SIGINT, handler)
    return main()


def _imported(module: str) -> tuple[Any, Any]:
    """Return `main` of a module, and the handler of SIGINT from before, in whose place is the system's default."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # a background job of a shell ignores the signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return importlib.import_module(f"server_scripts.{module}").main, handler
