"""Owns RUN_DIR: the lock that a running server holds, and the state file that says which processes are its own.

A process is recorded with its start time, so that a recycled pid is never taken for one of ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import stat
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ConfigError
from engine.settings.processes import LORAS_FILE, STOPPING_FILE
from engine.settings.served import SERVED_FILE


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
        return found is not None and found.start_time == self.start_time and not found.has_ended

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """With all that it has started, if it leads a group, as every process of the server does."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                leads = os.getpgid(self.pid) == self.pid
                (os.killpg if leads else os.kill)(self.pid, signal.SIGKILL)


class ProcessStat(NamedTuple):
    state: str
    parent: int
    start_time: int
    num_threads: int

    @property
    def has_ended(self) -> bool:
        """With all its threads: of one that is killed the first may be gone while others still hold its ports."""
        return self.state in "ZX" and self.num_threads <= 1


def read_stat(pid: int) -> ProcessStat | None:
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = line.rpartition(b")")[2].split()  # the name before it may hold anything, also half a character
    return ProcessStat(fields[0].decode(), int(fields[1]), int(fields[19]), int(fields[17]))


def children_of(pid: int) -> list[int]:
    """Direct children, from a walk over /proc: the kernel's own list is an option that not every kernel has."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [child for child in pids if (found := read_stat(child)) and found.parent == pid]


@dataclass
class ServerState:
    """What the state file says about the server that holds the lock."""

    phase: str  # preparing, starting, ready, stopping; while the model is changed: changing, ending the model
    supervisor: Process
    since: float  # seconds since the epoch
    model: str
    host: str  # the address it listens on
    ports: dict[str, int]  # variable -> port
    log_dir: str
    stop_timeout_s: float
    processes: list[Process] = field(default_factory=list)
    scheme: str = "http"  # of the HTTP port; https with a certificate
    fingerprint: str = ""  # of settings and model: who has the same may take the processes over
    settings: dict[str, str] = field(default_factory=dict)  # of each a fingerprint

    @classmethod
    def from_json(cls, text: str) -> ServerState:
        values: dict[str, Any] = json.loads(text)
        values["supervisor"] = Process(**values["supervisor"])
        values["processes"] = [Process(**item) for item in values["processes"]]
        return cls(**values)


def read_state(run_path: Path) -> ServerState | None:
    """None when no server has been started, all was cleaned up since, or another version wrote it."""
    try:
        return ServerState.from_json((run_path / "state.json").read_text())
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def make_folder(variable: str, path: Path, mode: int = 0o777) -> None:
    """For what this process writes."""
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{variable}: the folder {path} cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{variable}: the folder {path} cannot be written to by this user")


class RunDir:
    """The folder, private to its user. Raises ConfigError when somebody else could have a hand in it."""

    def __init__(self, path: Path, shm_dir: Path = Path("/dev/shm")):
        self.path = path
        self._shm_dir = shm_dir
        make_folder("RUN_DIR", path, 0o700)
        found = path.lstat()  # not stat: whoever may write to /tmp may have put a link there
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"RUN_DIR is {str(path)!r}, it must be a folder, not a link or a file")
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise ConfigError(f"RUN_DIR is {str(path)!r}, it must belong to this user and be writable by nobody else")
        # No other folder under this kernel has these numbers, not even one of a container that shares /dev/shm.
        self.shm_prefix = f"llm_server_{found.st_dev:x}_{found.st_ino:x}_"

    def lock(self, wait_s: float = 0.0) -> int | None:
        """A file descriptor that holds the lock as long as any process has it open; None: a server holds it."""
        deadline = time.monotonic() + wait_s
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return handle
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(handle)
                    return None
                time.sleep(0.05)

    def write(self, name: str, text: str) -> None:
        """All of it or nothing."""
        partial = self.path / f"{name}.partial"
        partial.touch(0o600)
        partial.write_text(text)
        partial.replace(self.path / name)

    def write_state(self, state: ServerState) -> None:
        self.write("state.json", json.dumps(asdict(state), indent=2) + "\n")

    def read_state(self) -> ServerState | None:
        return read_state(self.path)

    def touch_all(self) -> None:
        """Those who sweep /tmp take what has been left alone for some days."""
        for path in (self.path, *self.path.rglob("*")):
            os.utime(path, follow_symlinks=False)

    def clean_up(self) -> None:
        """Forgets a server that has ended."""
        self.remove_shared_memory()
        for name in ("state.json", STOPPING_FILE, SERVED_FILE, LORAS_FILE):
            (self.path / name).unlink(missing_ok=True)

    def remove_shared_memory(self) -> None:
        """What a killed tritonserver has left; the prefix is this server's alone."""
        for path in self._shm_dir.glob(f"{self.shm_prefix}*"):
            path.unlink(missing_ok=True)
