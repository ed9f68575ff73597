"""Run directory (RUN_DIR): the lock that a running server holds, and the state file with its processes.

A process is recorded with its start time, so that a recycled pid is never taken for one of the server's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import stat
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ConfigError
from engine.settings.processes import LORAS_FILE, STOPPING_FILE, ProcessSettings, default_run_path
from engine.settings.served import SERVED_FILE


@dataclass(frozen=True)
class Process:
    """Process that is identified by its pid and start time."""

    name: str
    pid: int
    start_time: int  # clock ticks since boot, from /proc

    @classmethod
    def of(cls, name: str, pid: int) -> Process | None:
        """Return the process with this pid, or None if there is none."""
        found = read_stat(pid)
        return cls(name, pid, found.start_time) if found else None

    @property
    def is_alive(self) -> bool:
        """Return True if the process is still running."""
        found = read_stat(self.pid)
        return found is not None and found.start_time == self.start_time and not found.has_ended

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process if it is alive."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill the process and, if it leads a process group as all processes of the server do, the whole group."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                leads = os.getpgid(self.pid) == self.pid
                (os.killpg if leads else os.kill)(self.pid, signal.SIGKILL)


class ProcessStat(NamedTuple):
    """Fields of /proc/PID/stat."""

    state: str
    parent: int
    start_time: int
    num_threads: int

    @property
    def has_ended(self) -> bool:
        """Return True if the process has ended with all its threads.

        The first thread of a killed process may end while others still hold its ports.
        """
        return self.state in "ZX" and self.num_threads <= 1


def read_stat(pid: int) -> ProcessStat | None:
    """Return the stat of a process, or None if there is none."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = line.rpartition(b")")[2].split()  # the process name before it may contain any bytes
    return ProcessStat(fields[0].decode(), int(fields[1]), int(fields[19]), int(fields[17]))


def children_of(pid: int) -> list[int]:
    """Return the pids of direct children.

    They are found by a walk over /proc, because not every kernel has the list of children.
    """
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [child for child in pids if (found := read_stat(child)) and found.parent == pid]


@dataclass
class ServerState:
    """Content of the state file: the server that holds the lock."""

    phase: str  # preparing, starting, ready, stopping; during a reload: changing, ending the model
    supervisor: Process
    since: float  # seconds since the epoch
    model: str
    host: str  # the address it listens on
    ports: dict[str, int]  # variable -> port
    log_dir: str
    stop_timeout_s: float
    processes: list[Process] = field(default_factory=list)
    scheme: str = "http"  # scheme of the HTTP port: https if TLS is configured
    fingerprint: str = ""  # fingerprint of settings and model; a start with the same one may take the processes over
    settings: dict[str, str] = field(default_factory=dict)  # variable -> fingerprint of its value

    @classmethod
    def from_json(cls, text: str) -> ServerState:
        """Return the parsed state. Raise ValueError, TypeError or KeyError if another version wrote it."""
        values: dict[str, Any] = json.loads(text)
        values["supervisor"] = Process(**values["supervisor"])
        values["processes"] = [Process(**item) for item in values["processes"]]
        return cls(**values)


def read_state(run_path: Path) -> ServerState | None:
    """Return the state, or None if no server was started, it was cleaned up, or another version wrote it."""
    try:
        return ServerState.from_json((run_path / "state.json").read_text())
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def stop_command(run_path: Path, log_dir: str) -> str:
    """Return the command that stops the server of this run directory, which writes to the absolute path `log_dir`."""
    if run_path == default_run_path():
        return "stop_server"
    follows = run_path == ProcessSettings(log_dir=log_dir).run_path
    folder = f"FD_LOG_DIR={shlex.quote(log_dir)}" if follows else f"RUN_DIR={shlex.quote(str(run_path.absolute()))}"
    return f"{folder} stop_server"


def make_folder(variable: str, path: Path, mode: int = 0o777) -> None:
    """Create a folder that this process writes to. Raise ConfigError that names `variable` if that is impossible."""
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{variable}: the folder {path} cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{variable}: the folder {path} cannot be written to by this user")


class RunDir:
    """Run directory, private to its user. The constructor raises ConfigError if another user could modify it."""

    def __init__(self, path: Path, shm_dir: Path = Path("/dev/shm")):
        self.path = path
        self._shm_dir = shm_dir
        make_folder("RUN_DIR", path, 0o700)
        found = path.lstat()  # not stat: in /tmp another user may have created a link
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"RUN_DIR is {str(path)!r}, it must be a folder, not a link or a file")
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise ConfigError(f"RUN_DIR is {str(path)!r}, it must belong to this user and not be writable by others")
        # Device and inode are unique under this kernel, also among containers that share /dev/shm.
        self.shm_prefix = f"llm_server_{found.st_dev:x}_{found.st_ino:x}_"

    def lock(self, wait_s: float = 0.0) -> int | None:
        """Return a file descriptor that holds the lock while any process has it open, or None if a server holds it for
        `wait_s` seconds.
        """
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
        """Write a file atomically. Raises an OSError that names the file."""
        partial = self.path / f"{name}.partial"
        partial.touch(0o600)
        try:
            partial.write_text(text)
        except OSError as error:  # an error of a full disk names no file
            raise OSError(error.errno, error.strerror, str(partial)) from None
        partial.replace(self.path / name)

    def write_state(self, state: ServerState) -> None:
        """Write the state file."""
        self.write("state.json", json.dumps(asdict(state), indent=2) + "\n")

    def read_state(self) -> ServerState | None:
        """Return the state of the server, see `read_state`."""
        return read_state(self.path)

    def touch_all(self) -> None:
        """Update the times of all files, because cleaners of /tmp remove files that are untouched for days."""
        for path in (self.path, *self.path.rglob("*")):
            os.utime(path, follow_symlinks=False)

    def clean_up(self) -> None:
        """Remove the files of a server that has ended."""
        self.remove_shared_memory()
        for name in ("state.json", STOPPING_FILE, SERVED_FILE, LORAS_FILE):
            (self.path / name).unlink(missing_ok=True)

    def remove_shared_memory(self) -> None:
        """Remove the shared memory that a killed tritonserver has left. The prefix belongs to this server alone."""
        for path in self._shm_dir.glob(f"{self.shm_prefix}*"):
            path.unlink(missing_ok=True)
