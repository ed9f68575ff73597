"""The log files in FD_LOG_DIR: one a process, a bounded number of bounded files."""

from __future__ import annotations

import os
import shutil
import threading
from logging.handlers import RotatingFileHandler
from pathlib import Path

TAIL_BYTES = 64 << 10
COPY_BYTES = 1 << 20
COPY_EVERY_S = 0.2


def rotate(path: Path, num_backups: int, has_writer: bool = False) -> None:
    """name -> name.1 -> name.2 ...; the oldest goes. A writer goes on: it has opened the file for appending."""
    if num_backups and path.exists():
        handler = RotatingFileHandler(path, backupCount=num_backups, delay=True)
        handler.rotator = _copy if has_writer else None
        handler.doRollover()
        handler.close()
    if path.exists():
        os.truncate(path, 0)


def _copy(path: str, backup: str) -> None:
    try:
        shutil.copyfile(path, backup)
    except OSError:  # no room for a copy: all the more reason to start anew
        Path(backup).unlink(missing_ok=True)


def tail(path: Path, num_lines: int) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-num_lines:]


class LogConsole:
    """Copies what is appended to log files to a file descriptor, whole lines with the name of their process. In a
    thread of its own: a terminal may stand still, and nobody ever waits for it; the files keep what it has missed."""

    def __init__(self, paths: dict[str, Path], fd: int):
        self._paths = paths
        self._fd = fd
        self._offsets = dict.fromkeys(paths, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Waits until everything has been written, but no longer than that."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.wait(COPY_EVERY_S):
            self.copy()
        self.copy()

    def copy(self) -> None:
        for name, path in self._paths.items():
            try:
                size = path.stat().st_size
                if size < self._offsets[name]:  # started anew
                    self._offsets[name] = 0
                while self._offsets[name] < size and self._copy_some(name, path):
                    pass
            except OSError:  # the file is just being taken away, or nobody reads any more
                pass

    def _copy_some(self, name: str, path: Path) -> int:
        with path.open("rb") as file:
            file.seek(self._offsets[name])
            data = file.read(COPY_BYTES)
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == COPY_BYTES else b"")
        self._offsets[name] += len(whole)
        prefix = b"[%s] " % name.encode() if name else b""
        text = b"".join(b"%s%s\n" % (prefix, line) for line in whole.splitlines())
        while text:  # past the buffers of sys.stdout, whose locks this thread must not hold when the process ends
            text = text[os.write(self._fd, text) :]
        return len(whole)
