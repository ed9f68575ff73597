"""One child process of the supervisor: how it is started, what is known about it, and when it is restarted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import HostLost
from server_scripts.run_dir import Process, children_of, read_stat

ROOT = Path(__file__).resolve().parents[1]
HEALTHY_AFTER_S = 60.0  # after this time without a crash the next one counts as the first
MAX_BACK_OFF_S = 30.0
MAX_STOPPED_S = 15.0  # by SIGSTOP; the same time as an engine may be silent
MAX_SUSPECTS, SUSPECTS_S = 8, 300.0  # limit of different suspect requests within that time or without progress
HOST_LOST_S = 1.0  # delay before an engine that has lost another machine is restarted
START_AGAIN_S = 5.0  # delay if the process could not be created
SECRETS = {"API_KEY", "API_KEYS", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}  # the hub's token has two names
# Each child has its own process group, for signals, but shares the server's session. Linux divides the cores among
# sessions first (autogroups), and with its own session a mostly idle process such as the health port was sometimes
# delayed by a tenth of a second.
PROCESS_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}


@dataclass(frozen=True)
class ChildSpec:
    """Command, environment and files of a child process."""

    name: str
    command: list[str]
    env: dict[str, str]
    log_path: Path
    cwd: Path = ROOT
    max_crashes: int | None = None  # crashes in a row until it is given up; None: it is always restarted
    progress_file: Path | None = None  # written by the process when it has done work once; None: an answer is enough
    suspect_file: Path | None = None  # contains the hash of the request that it computes alone, if any
    socket: Path | None = None  # removed before a start, because a killed process leaves it behind
    helper_program: str = ""  # file name of its helpers' program; empty: every child process is a helper


@dataclass
class Child:
    """State of one child process. Times are seconds of the monotonic clock."""

    spec: ChildSpec
    process: Process | None = None  # None: not running
    is_ours: bool = True  # False: started by an earlier supervisor, so its exit status will be unknown
    helpers: list[Process] = field(default_factory=list)  # its child processes, which must live as long as it does
    started_at: float = 0.0
    healthy_since: float | None = None
    stopped_since: float | None = None  # first observation of the stop
    has_served: bool = False  # one of its processes was healthy
    num_crashes: int = 0  # in a row
    restart_at: float | None = None  # None: running, not started yet, or given up
    exit_reason: str = ""  # how the last process ended
    was_killed: bool = False  # the last process, by a signal
    # Hash of a request that was running alone during a crash -> times of these crashes
    suspects: dict[str, list[float]] = field(default_factory=dict)

    def start(self) -> None:
        """Start the process.

        If the system cannot create one, `process` stays None and the next attempt is scheduled.
        """
        self.helpers, self.is_ours = [], True
        self.healthy_since = self.restart_at = None
        try:
            for left in filter(None, (self.spec.progress_file, self.spec.suspect_file, self.spec.socket)):
                left.unlink(missing_ok=True)
            started = self._popen()
        except OSError as error:
            self.exit_reason = f"could not be started: {error}"
            self.restart_at = time.monotonic() + START_AGAIN_S
            return
        started.returncode = 0  # the supervisor reaps: Popen must not wait for a pid that may have been reused
        self.process = Process.of(self.spec.name, started.pid)
        self.started_at = time.monotonic()

    def _popen(self) -> subprocess.Popen[bytes]:
        self.spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log_path.open("ab") as log:
            return subprocess.Popen(
                self.spec.command,
                env=self.spec.env | ({"ENGINE_IS_BACK": "1"} if self.has_served else {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.spec.cwd,
                **PROCESS_GROUP,
                umask=0o077,  # shared memory and sockets carry prompts and answers
            )

    def take_over(self, processes: Sequence[Process]) -> None:
        """Continue with the process that an earlier supervisor has left running, if it is in `processes`."""
        self.process = next((each for each in processes if each.name == self.spec.name and each.is_alive), None)
        if self.process:
            self.is_ours, self.started_at = False, time.monotonic()
            self.helpers = [each for each in processes if each.name == self._helper_name]

    @property
    def _helper_name(self) -> str:
        return f"{self.spec.name} helper"

    def was_running(self, at: float) -> bool:
        """Return True if the current process was running at time `at`."""
        return self.process is not None and at > self.started_at

    def check_stopped_for_long(self) -> bool:
        """Return True if the process or one of its helpers has been stopped by SIGSTOP for too long."""
        found = [read_stat(each.pid) for each in (self.process, *self.helpers) if each]
        now, is_stopped = time.monotonic(), any(each.state == "T" for each in found if each)
        self.stopped_since = (self.stopped_since or now) if is_stopped else None
        return self.stopped_since is not None and now - self.stopped_since > MAX_STOPPED_S

    def find_helpers(self) -> None:
        """Find the child processes that this one needs."""
        if self.process:
            pids = [pid for pid in children_of(self.process.pid) if self._is_helper(pid)]
            self.helpers = [process for pid in pids if (process := Process.of(self._helper_name, pid))]

    def _is_helper(self, pid: int) -> bool:
        try:
            return not self.spec.helper_program or Path(f"/proc/{pid}/exe").readlink().name == self.spec.helper_program
        except OSError:  # it has ended
            return False

    def signal(self, number: int) -> None:
        """Send a signal to the process, which is responsible for its own children."""
        if self.process:
            self.process.kill(number)

    def kill(self) -> None:
        """Kill the process and its process group.

        The pid cannot belong to another process: it is not reaped yet, or was reaped a moment ago.
        """
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for helper in self.helpers:
                helper.kill()

    def record_end(self, status: int | None) -> bool:
        """Record the exit and schedule the restart.

        Return False if it was no crash but a wait for another machine. `status` is that of waitpid, or None if it is
        unknown.
        """
        now = time.monotonic()
        if status is not None and os.WIFEXITED(status) and os.WEXITSTATUS(status) == HostLost.exit_status:
            self.process, self.healthy_since, self.restart_at = None, None, now + HOST_LOST_S
            self.exit_reason = "has lost another machine, and is going to wait for it"
            return False
        self.has_served |= self.healthy_since is not None or self._has_progressed()
        is_healthy = self.healthy_since is not None and now - self.healthy_since >= HEALTHY_AFTER_S
        self._count_crash(is_healthy or self._has_progressed(), now)
        self.exit_reason = "has ended" if status is None else describe_exit(status)
        self.was_killed = status is not None and os.WIFSIGNALED(status)
        self.process = None
        self.healthy_since = None
        if self.spec.max_crashes is None or self.num_crashes < self.spec.max_crashes:
            self.restart_at = now + back_off(self.num_crashes)
        return True

    def _count_crash(self, is_first: bool, now: float) -> None:
        """Count a crash unless a request is to blame for it.

        If too many different requests are, something else fails and all crashes count.
        """
        if is_first:  # otherwise there was no progress in between, however long it took
            self.suspects = {each: at for each, at in self.suspects.items() if now - at[-1] < SUSPECTS_S}
        if (suspect := self._suspect()) is None:
            self.num_crashes = 1 if is_first else self.num_crashes + 1
            return
        self.suspects.setdefault(suspect, []).append(now)
        if len(self.suspects) >= MAX_SUSPECTS:
            self.num_crashes = max(self.num_crashes + 1, sum(map(len, self.suspects.values())))
        elif len(self.suspects[suspect]) > 1:  # it was alone in an earlier crash as well
            self.num_crashes = 0

    def _suspect(self) -> str | None:
        try:
            return self.spec.suspect_file.read_text() if self.spec.suspect_file else None
        except OSError:
            return None

    def _has_progressed(self) -> bool:
        """Return True if the process has done work since its start.

        Only processes that crash repeatedly without any progress are restarted with a delay.
        """
        return self.spec.progress_file.exists() if self.spec.progress_file else self.healthy_since is not None


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without API keys and tokens, for processes that do not need them.

    An environment can be read by other processes and ends up in crash reports.
    """
    return {name: text for name, text in environ.items() if name not in SECRETS}


def back_off(num_crashes: int) -> float:
    """Return the delay in seconds before the next restart: 0 for the first crash, then 0.25, 0.5, 1, 2, ..."""
    return 0.0 if num_crashes <= 1 else min(2.0 ** (num_crashes - 4), MAX_BACK_OFF_S)


def describe_exit(status: int) -> str:
    """Return a description of the exit `status` of waitpid."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"was killed by {signal.Signals(number).name if number in list(signal.Signals) else number}"
    return f"ended with exit status {os.waitstatus_to_exitcode(status)}"
