"""Files to download: path, URL and digest. Paths come from servers and are not trusted."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

CHUNK = 1 << 20  # bytes
PARTIAL = ".partial"
RECORD = "download.json"
LOCK = ".download.lock"

HASHES = {"md5": hashlib.md5, "sha256": hashlib.sha256, "git-sha1": hashlib.sha1}


class DownloadError(Exception):
    """The download failed for good. The message is one line for the operator."""


class Denied(DownloadError):
    """The server does not let us in."""


class Temporary(DownloadError):
    """Worth another try: a lost connection, a busy server."""

    wait_s = 0.0  # time that the server asks for before a retry


class Corrupt(Temporary):
    """The received data is not a part of the file and is discarded. Two such errors in a row end the download."""


@dataclass(frozen=True)
class RemoteFile:
    path: str  # relative to the model's directory, checked
    url: str
    digest: str  # "md5:...", "sha256:..." or "git-sha1:..."
    size: int | None = None  # bytes; a mirror's list does not tell


@dataclass(frozen=True)
class Listing:
    """Everything a model's directory shall hold."""

    files: list[RemoteFile]
    revision: str | None = None
    authorization: str | None = None  # header for the server in the files' URLs, not sent to redirect targets
    check: Callable[[Path], None] | None = None  # raises when the first file says that the others are of no use


def check_path(path: str) -> str:
    """Return the path if it is relative, stays below its directory and does not collide with files of the download.
    Raises DownloadError."""
    parts = path.split("/")
    if not path or {"", ".", ".."} & set(parts) or re.search(r"[\\\x00-\x1f\x7f]", path):
        raise DownloadError(f"refused the unsafe path {path!r}")
    if path in (RECORD, LOCK) or path.endswith(PARTIAL):
        raise DownloadError(f"refused the path {path!r}: the download keeps its own notes there")
    return path


def place(root: Path, path: str) -> Path:
    """Return the target of a file in `root`. Raises DownloadError if a symbolic link leads out of `root`."""
    target = root / path
    if not target.parent.resolve().is_relative_to(root.resolve()) or partial_of(target).is_symlink():
        raise DownloadError(f"{path}: refused, a symbolic link leads out of {root}")
    return target


def partial_of(target: Path) -> Path:
    return target.with_name(target.name + PARTIAL)


def new_hash(digest: str, size: int | None) -> hashlib._Hash:
    """Return an empty hash of the kind of `digest`. For Git's SHA-1 it contains the header with the size."""
    kind = digest.partition(":")[0]
    prefix = b"blob %d\0" % (size or 0) if kind == "git-sha1" else b""
    return HASHES[kind](prefix, usedforsecurity=False)


def chunks_of(file: BinaryIO) -> Iterable[bytes]:
    return iter(lambda: file.read(CHUNK), b"")


def has_digest(path: Path, digest: str) -> bool:
    running = new_hash(digest, path.stat().st_size)
    with path.open("rb") as file:
        for chunk in chunks_of(file):
            running.update(chunk)
    return running.hexdigest() == digest.partition(":")[2]
