"""Ends this process when its event loop has not run for so long that it hangs: who is served by it would wait for ever,
and of several workers on a port nobody else can tell. The supervisor starts another; the log says where it was."""

from __future__ import annotations

import asyncio
import faulthandler

MAX_BUSY_S = 30.0  # 2,000 streams at once on a cold server keep a loop busy for less than 2


async def end_when_hung() -> None:
    """Until it is cancelled."""
    try:
        while True:
            faulthandler.dump_traceback_later(MAX_BUSY_S, exit=True)
            await asyncio.sleep(MAX_BUSY_S / 10)
    finally:
        faulthandler.cancel_dump_traceback_later()
