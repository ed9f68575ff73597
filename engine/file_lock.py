"""One process at a time, by a lock on a file that goes with its process, however that ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

log = logging.getLogger(__name__)


def unfollowed(path: str, flags: int) -> int:
    """Open a file without following a symbolic link at `path`; an opener for `open`. Raises OSError."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", path) from None
        raise


@contextlib.contextmanager
def file_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on the file. `on_wait` is called if another process has it. On a file system without locks
    the operator has to prevent concurrent use.
    """
    with open(path, "w", opener=unfollowed) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("%s cannot be locked: %s", path, error.strerror)
        yield
