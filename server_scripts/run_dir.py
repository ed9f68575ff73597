"""Owns RUN_DIR: the lock that a running server holds, and the state file that says which processes are its own.

A process is recorded with its start time, so that a recycled pid is never taken for one of ours.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import signal
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

INSTANCE = "[0-9a-f]{12}"


@dataclass(frozen=True)
class Process:
    """A process that can be told from a later one with the same pid."""

    name: str
    pid: int
    start_time: int  # clock ticks since boot, from /proc

    @classmethod
    def of(cls, name: str, pid: int) -> Process | None:
        """None when there is no such process any more."""
        found = read_stat(pid)
        return cls(name, pid, found.start_time) if found else None

    @property
    def is_alive(self) -> bool:
        found = read_stat(self.pid)
        return found is not None and found.start_time == self.start_time and found.state not in "ZX"

    def kill(self, number: int = signal.SIGKILL) -> bool:
        """Sends the signal to this very process: a pidfd pins it while its start time is compared."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except (OSError, AttributeError):  # an old kernel, a sandbox that forbids it, a Python built without it
            handle = None
        try:
            if not self.is_alive:
                return False
            if handle is None:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(handle, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            if handle is not None:
                os.close(handle)


@dataclass(frozen=True)
class Stat:
    state: str
    parent: int
    start_time: int


def read_stat(pid: int) -> Stat | None:
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = line.rpartition(b")")[2].split()  # the name before it may hold anything, also half a character
    return Stat(fields[0].decode(), int(fields[1]), int(fields[19]))


def children_of(pid: int) -> list[int]:
    """Direct children, from a walk over /proc: the kernel's own list is an option that not every kernel has."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [child for child in pids if (found := read_stat(child)) and found.parent == pid]


@dataclass
class State:
    """What the state file says about the server that holds the lock."""

    phase: str  # preparing, starting, ready, stopping
    supervisor: Process
    since: float  # seconds since the epoch
    model: str
    host: str  # the address it listens on
    ports: dict[str, int]  # variable -> port
    log_dir: str
    shm_prefix: str
    stop_timeout_s: float
    processes: list[Process] = field(default_factory=list)

    @classmethod
    def from_json(cls, text: str) -> State:
        values: dict[str, Any] = json.loads(text)
        values["supervisor"] = Process(**values["supervisor"])
        values["processes"] = [Process(**item) for item in values["processes"]]
        return cls(**values)


def make_folder(variable: str, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_be_made(variable, path, error) from None


def _cannot_be_made(variable: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{variable}: the folder {path} cannot be made: {error.strerror}")


class RunDir:
    """The folder, private to its user. Raises ConfigError when somebody else could have a hand in it."""

    def __init__(self, path: Path, shm_dir: Path = Path("/dev/shm")):
        self.path = path
        self.shm_dir = shm_dir
        make_folder("RUN_DIR", path.parent)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise _cannot_be_made("RUN_DIR", path, error) from None
        found = path.lstat()  # not stat: whoever may write to /tmp may have put a link there
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"RUN_DIR is {str(path)!r}, it must be a folder, not a link or a file")
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise ConfigError(f"RUN_DIR is {str(path)!r}, it must belong to this user and be writable by nobody else")

    def lock(self) -> int | None:
        """A file descriptor that holds the lock as long as any process has it open; None: a server holds it."""
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        return handle

    @property
    def instance(self) -> str:
        """A name that no other server on this machine has, even from a container that shares /dev/shm."""
        path = self.path / "instance"
        name = path.read_text(errors="replace") if path.exists() else ""
        if not re.fullmatch(INSTANCE, name):  # a full disk leaves it empty, and that would be everybody's name
            name = secrets.token_hex(6)
            partial = path.with_name("instance.partial")
            partial.write_text(name)
            partial.replace(path)
        return name

    @property
    def shm_prefix(self) -> str:
        return f"llm_server_{self.instance}_"

    def write_state(self, state: State) -> None:
        partial = self.path / "state.json.partial"
        partial.write_text(json.dumps(asdict(state), indent=2) + "\n")
        partial.replace(self.path / "state.json")

    def read_state(self) -> State | None:
        """None when no server has been started, all was cleaned up since, or another version wrote it."""
        try:
            return State.from_json((self.path / "state.json").read_text())
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def touch_all(self) -> None:
        """Those who sweep /tmp take what has been left alone for some days."""
        for path in (self.path, *self.path.rglob("*")):
            os.utime(path, follow_symlinks=False)

    def clean_up(self, shm_prefix: str) -> None:
        """Forgets a server that has ended."""
        self.remove_shared_memory(shm_prefix)
        (self.path / "state.json").unlink(missing_ok=True)

    def remove_shared_memory(self, shm_prefix: str) -> None:
        """What a killed tritonserver has left; its prefix is this server's alone."""
        for path in self.shm_dir.glob(f"{shm_prefix}*"):
            path.unlink(missing_ok=True)
