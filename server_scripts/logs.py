"""The log files in FD_LOG_DIR: one a process, a bounded number of bounded files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TextIO

TAIL_BYTES = 64 << 10


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


class Follower:
    """Copies what is appended to log files to one stream, whole lines with the name of their process."""

    def __init__(self, paths: dict[str, Path], to: TextIO):
        self._paths = paths
        self._to = to
        self._offsets = dict.fromkeys(paths, 0)

    def copy(self) -> None:
        for name, path in self._paths.items():
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                continue
            if size < self._offsets[name]:  # started anew
                self._offsets[name] = 0
            if size > self._offsets[name]:
                self._copy_one(name, path)
        self._to.flush()

    def _copy_one(self, name: str, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._offsets[name])
            data = file.read(1 << 20)
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == 1 << 20 else b"")
        self._offsets[name] += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self._to.write(f"[{name}] {line}\n")
