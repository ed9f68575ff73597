"""Watchdog of the event loop.

It ends the process when the loop has not run for so long that it must hang: its clients would wait forever, and workers
that share the port cannot notice. The supervisor restarts the process; the log has the stack trace.
"""

from __future__ import annotations

import asyncio
import faulthandler

MAX_BUSY_S = 30.0  # seconds; 2,000 streams at once on a cold server keep a loop busy for less than 2


async def end_when_hung() -> None:
    """Reset the watchdog periodically, until cancelled."""
    try:
        while True:
            faulthandler.dump_traceback_later(MAX_BUSY_S, exit=True)
            await asyncio.sleep(MAX_BUSY_S / 10)
    finally:
        faulthandler.cancel_dump_traceback_later()
