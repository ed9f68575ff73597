"""One process of the server: how it is started, what is known about it, and when it may be started again."""

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
HEALTHY_AFTER_S = 60.0  # without a crash until the next one counts as the first, whatever was computed
MAX_BACK_OFF_S = 30.0
MAX_STOPPED_S = 15.0  # by SIGSTOP; as long as an engine may be silent
MAX_SUSPECTS, SUSPECTS_S = 8, 300.0  # so many different requests within that time, or with nothing computed between
HOST_LOST_S = 1.0  # until an engine that has lost another machine starts to wait for it
START_AGAIN_S = 5.0  # when not even a process could be made
SECRETS = {"API_KEY", "API_KEYS", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}  # the hub's token by both of its names
# A group of its own, for signals, in the server's session: outside containers Linux divides the cores among sessions
# first, and who had one of its own and little to do, as the health port, waited for a tenth of a second at times.
OF_ITS_OWN: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}


@dataclass(frozen=True)
class ChildSpec:
    name: str
    command: list[str]
    env: dict[str, str]
    log_path: Path
    cwd: Path = ROOT
    max_crashes: int | None = None  # in a row; None: it is always started again
    progress_file: Path | None = None  # it writes that when it has done its work once; None: to answer is enough
    suspect_file: Path | None = None  # has the hash of the request that it computes alone, if it does
    socket: Path | None = None  # it would not take over that of one that was killed
    helper_program: str = ""  # file name of the program that its helpers run; empty: any of its children is one


@dataclass
class Child:
    """Times are seconds of the monotonic clock."""

    spec: ChildSpec
    process: Process | None = None  # None: it does not run
    is_ours: bool = True  # False: an earlier supervisor has started it, so nobody tells us how it ends
    helpers: list[Process] = field(default_factory=list)  # its own, that must live as long as it does
    started_at: float = 0.0
    healthy_since: float | None = None
    stopped_since: float | None = None  # as far as was seen
    num_crashes: int = 0  # in a row
    restart_at: float | None = None  # None: running, not started yet, or given up
    last_words: str = ""  # how it ended
    suspects: dict[str, list[float]] = field(default_factory=dict)  # requests that it ended with, alone: when

    def start(self) -> None:
        """When the machine has no process left for it, `process` stays None and the next start is due later."""
        self.helpers, self.is_ours = [], True
        self.healthy_since = self.restart_at = None
        try:
            for left in filter(None, (self.spec.progress_file, self.spec.suspect_file, self.spec.socket)):
                left.unlink(missing_ok=True)
            started = self._popen()
        except OSError as error:
            self.last_words = f"could not be started: {error}"
            self.restart_at = time.monotonic() + START_AGAIN_S
            return
        started.returncode = 0  # the supervisor reaps; Popen must not wait for a pid that may be another's by then
        self.process = Process.of(self.spec.name, started.pid)
        self.started_at = time.monotonic()

    def _popen(self) -> subprocess.Popen[bytes]:
        self.spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log_path.open("ab") as log:
            return subprocess.Popen(
                self.spec.command,
                env=self.spec.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.spec.cwd,
                **OF_ITS_OWN,
                umask=0o077,  # prompts and answers pass through Triton's shared memory, tokens through the sockets
            )

    def take_over(self, processes: Sequence[Process]) -> None:
        """Those of an earlier supervisor, if it is among them."""
        self.process = next((each for each in processes if each.name == self.spec.name and each.is_alive), None)
        if self.process:
            self.is_ours, self.started_at = False, time.monotonic()
            self.helpers = [each for each in processes if each.name == self._helper_name]

    @property
    def _helper_name(self) -> str:
        return f"{self.spec.name} helper"

    def was_running(self, at: float) -> bool:
        return self.process is not None and at > self.started_at

    def is_stopped_for_long(self) -> bool:
        """It, or what it needs."""
        found = [read_stat(each.pid) for each in (self.process, *self.helpers) if each]
        now, is_stopped = time.monotonic(), any(each.state == "T" for each in found if each)
        self.stopped_since = (self.stopped_since or now) if is_stopped else None
        return self.stopped_since is not None and now - self.stopped_since > MAX_STOPPED_S

    def find_helpers(self) -> None:
        if self.process:
            pids = [pid for pid in children_of(self.process.pid) if self._is_helper(pid)]
            self.helpers = [process for pid in pids if (process := Process.of(self._helper_name, pid))]

    def _is_helper(self, pid: int) -> bool:
        try:
            return not self.spec.helper_program or Path(f"/proc/{pid}/exe").readlink().name == self.spec.helper_program
        except OSError:  # it has ended
            return False

    def signal(self, number: int) -> None:
        """To the process, for it to end what it started."""
        if self.process:
            self.process.kill(number)

    def kill(self) -> None:
        """The process and all of its group. Its number is still theirs: it is not reaped yet, or has only just been
        by somebody else."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for helper in self.helpers:
                helper.kill()

    def has_ended(self, status: int | None) -> bool:
        """Takes note of the exit and of when the next start is due. `status` is waitpid's, None if nobody knows it.
        False: it was no crash, but waits for others."""
        now = time.monotonic()
        if status is not None and os.WIFEXITED(status) and os.WEXITSTATUS(status) == HostLost.exit_status:
            self.process, self.healthy_since, self.restart_at = None, None, now + HOST_LOST_S
            self.last_words = "has lost another machine, and is going to wait for it"
            return False
        is_healthy = self.healthy_since is not None and now - self.healthy_since >= HEALTHY_AFTER_S
        self._count_crash(is_healthy or self._has_progressed(), now)
        self.last_words = "has ended" if status is None else describe_exit(status)
        self.process = None
        self.healthy_since = None
        if self.spec.max_crashes is None or self.num_crashes < self.spec.max_crashes:
            self.restart_at = now + back_off(self.num_crashes)
        return True

    def _count_crash(self, is_first: bool, now: float) -> None:
        """A crash that a request is to blame for does not count, unless too many different ones are: then it is
        something else that fails."""
        if is_first:  # else nothing has worked in between, however long that took
            self.suspects = {each: at for each, at in self.suspects.items() if now - at[-1] < SUSPECTS_S}
        if (suspect := self._suspect()) is None:
            self.num_crashes = 1 if is_first else self.num_crashes + 1
            return
        self.suspects.setdefault(suspect, []).append(now)
        if len(self.suspects) >= MAX_SUSPECTS:
            self.num_crashes = max(self.num_crashes + 1, sum(map(len, self.suspects.values())))
        elif len(self.suspects[suspect]) > 1:  # it is to blame, for the crash before it was alone, too
            self.num_crashes = 0

    def _suspect(self) -> str | None:
        try:
            return self.spec.suspect_file.read_text() if self.spec.suspect_file else None
        except OSError:
            return None

    def _has_progressed(self) -> bool:
        """Since its start. Then the next start is at once: to wait is for what crashes again and again for nothing."""
        return self.spec.progress_file.exists() if self.spec.progress_file else self.healthy_since is not None


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """For a process that needs none of them: its environment can be read and ends up in reports of crashes."""
    return {name: text for name, text in environ.items() if name not in SECRETS}


def back_off(num_crashes: int) -> float:
    """The first restart is at once, as clients are waiting; then after 0.25, 0.5, 1, 2, ... seconds."""
    return 0.0 if num_crashes <= 1 else min(2.0 ** (num_crashes - 4), MAX_BACK_OFF_S)


def describe_exit(status: int) -> str:
    """`status` is waitpid's."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"was killed by {signal.Signals(number).name if number in list(signal.Signals) else number}"
    return f"ended with exit status {os.waitstatus_to_exitcode(status)}"
