"""The supervisor's output in the foreground, which somebody may have stopped reading: nobody ever waits for it."""

from __future__ import annotations

import io
import os
import threading

MAX_CHARS = 4 << 20  # that wait for their reader


class Console(io.TextIOBase):
    """Writes to a file descriptor in a thread of its own. What comes while too much waits already is dropped, which is
    said in its place. Without a reader, or without room where it goes, it is dropped without a word."""

    def __init__(self, fd: int, max_chars: int = MAX_CHARS):
        self._fd = fd
        self._max_chars = max_chars
        self._pieces: list[str] = []
        self._num_chars = 0  # of the pieces
        self._num_dropped = 0  # pieces, after those that wait
        self._is_writing = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="console", daemon=True).start()

    def write(self, text: str) -> int:
        with self._changed:
            if self._num_dropped or self._num_chars + len(text) > self._max_chars:
                self._num_dropped += 1
            else:
                self._pieces.append(text)
                self._num_chars += len(text)
            self._changed.notify_all()
        return len(text)

    def finish(self, timeout_s: float) -> None:
        """Waits until everything has been written, but no longer than that."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._is_writing or self._pieces or self._num_dropped), timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._pieces or self._num_dropped)
                text, num_dropped = "".join(self._pieces), self._num_dropped
                self._pieces, self._num_chars, self._num_dropped = [], 0, 0
                self._is_writing = True
            if num_dropped:
                text += f"[supervisor] {num_dropped} lines are left out here, as nobody was reading\n"
            self._write_out(text.encode(errors="replace"))

    def _write_out(self, data: bytes) -> None:
        """Past the buffers of sys.stdout, whose locks this thread must not hold when the process ends."""
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            pass
