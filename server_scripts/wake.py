"""What the supervisor's loop sleeps on."""

from __future__ import annotations

import os
import select
import signal


class Wake:
    """A pipe: threads write to it, and so do signals. A `threading.Event` must not be set by a signal handler: the
    handler may have interrupted its own thread while that held the event's lock."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def on_signals(self) -> None:
        """From now on every signal that has a handler ends `wait`, also one that comes just before it."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def set(self) -> None:
        """Ends the present `wait`, or the next one. From any thread."""
        try:
            os.write(self._write, b"!")
        except BlockingIOError:
            pass  # it is full of reasons to wake up already

    def wait(self, timeout_s: float) -> None:
        if self._poll.poll(timeout_s * 1000):
            os.read(self._read, 1 << 16)
