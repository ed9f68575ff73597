"""Folders that are created atomically: a folder gets its name when it is complete, and a list of its files shows later
whether it still is. Independent of the content."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.models.config_fields import ModelError, read_json

SIZES = "files.json"  # bytes of every other file, by its path in the folder


@contextmanager
def atomic_folder(out_dir: Path) -> Iterator[Path]:
    """Yield a folder to fill, which is renamed to `out_dir` on success and removed otherwise."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", suffix=".partial", dir=out_dir.parent))
    try:
        yield partial
        (partial / SIZES).write_text(json.dumps(_sizes(partial), indent=2) + "\n")
        partial.chmod(0o755)  # mkdtemp makes it private
        for path in (*partial.rglob("*"), partial):
            _sync(path)  # the final name must not outlive the content when the power fails
        partial.rename(out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_complete(directory: Path) -> bool:
    """Return whether the directory contains every file of the export, with its size. Additional files are allowed."""
    try:
        wanted = read_json(directory / SIZES)
    except ModelError:
        return False
    return wanted.items() <= _sizes(directory).items()


def _sizes(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.stat().st_size for path in directory.rglob("*") if path.is_file()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)
