"""The log files in FD_LOG_DIR: one a process, a bounded number of bounded files."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

TAIL_BYTES = 64 << 10
COPY_BYTES = 1 << 20
COPY_EVERY_S = 0.2


def rotate(path: Path, num_backups: int) -> None:
    """name -> name.1 -> name.2 ...; the oldest goes."""
    _make_room(path, num_backups)
    if path.exists():
        path.replace(_backup(path, 1)) if num_backups else path.unlink()


def bound(path: Path, max_bytes: int, num_backups: int) -> None:
    """Starts a file anew that has grown too long. Its writer goes on: it has opened the file for appending."""
    if not path.exists() or path.stat().st_size <= max_bytes:
        return
    if num_backups:
        _make_room(path, num_backups)
        try:
            shutil.copyfile(path, _backup(path, 1))
        except OSError:  # no room for a copy: all the more reason to start anew
            _backup(path, 1).unlink(missing_ok=True)
    with path.open("r+") as file:
        file.truncate(0)


def _make_room(path: Path, num_backups: int) -> None:
    for number in range(num_backups - 1, 0, -1):
        if _backup(path, number).exists():
            _backup(path, number).replace(_backup(path, number + 1))


def _backup(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def tail(path: Path, num_lines: int) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-num_lines:]


class Console:
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
