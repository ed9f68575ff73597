"""Log files in FD_LOG_DIR: one per process, with a limit on the size and number of files."""

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
    """Rename `path` to `path`.1, `path`.1 to `path`.2 and so on, and remove the oldest file.

    If the file has a writer it is copied and truncated instead, and the writer, which appends, continues.
    """
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
    except OSError:  # the disk is full: continue without a copy
        Path(backup).unlink(missing_ok=True)


def tail(path: Path, num_lines: int) -> list[str]:
    """Return the last `num_lines` lines that are not blank and not of a table. After an error tritonserver prints its
    options as a table, which is longer than any reason."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip() and not line.startswith(("| ", "+--"))][-num_lines:]


class LogConsole:
    """Thread that copies new lines of log files to a file descriptor, prefixed with the name of their process.

    A terminal may block the thread but never the server; the files keep what was not copied.
    """

    def __init__(self, paths: dict[str, Path], fd: int):
        self._paths = paths
        self._fd = fd
        self._offsets = dict.fromkeys(paths, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Wait until everything is written, for at most `timeout_s` seconds."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.wait(COPY_EVERY_S):
            self.copy()
        self.copy()

    def copy(self) -> None:
        """Copy what was appended since the last call."""
        for name, path in self._paths.items():
            try:
                size = path.stat().st_size
                if size < self._offsets[name]:  # the file was rotated
                    self._offsets[name] = 0
                while self._offsets[name] < size and self._copy_some(name, path):
                    pass
            except OSError:  # the file is being removed, or the terminal is closed
                pass

    def _copy_some(self, name: str, path: Path) -> int:
        with path.open("rb") as file:
            file.seek(self._offsets[name])
            data = file.read(COPY_BYTES)
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == COPY_BYTES else b"")
        self._offsets[name] += len(whole)
        prefix = b"[%s] " % name.encode() if name else b""
        text = b"".join(b"%s%s\n" % (prefix, line) for line in whole.splitlines())
        while text:  # not sys.stdout: this thread must not hold its locks when the process ends
            text = text[os.write(self._fd, text) :]
        return len(whole)
