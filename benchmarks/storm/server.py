"""Server of the stress test: observations of its processes from outside, and the disturbances."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from benchmarks.server import Server
from benchmarks.storm.ledger import Ledger
from engine.settings.config import Config
from server_scripts.probe import Probe
from server_scripts.run_dir import Process, children_of, read_stat

KINDS = ("engine", "rank", "fork", "grammar", "stub", "tritonserver", "gateway", "health", "supervisor")
MIN_AGE_S = 2.0  # minimum age of a victim: a process that does no work yet reveals nothing
END_S = 5.0  # until the last process has ended after a stop


class StormServer(Server):
    """Server whose processes can be observed and disturbed."""

    def processes(self) -> dict[str, list[Process]]:
        """Return the processes of each kind, as listed in the state file."""
        found: dict[str, list[Process]] = defaultdict(list)
        if state := self.run_dir.read_state():
            for process in (state.supervisor, *state.processes):
                name = "stub" if process.name == "tritonserver helper" else process.name.partition("-")[0]
                found[name].append(process)
        for engine in found["engine"]:
            children = children_of(engine.pid)
            servers = [pid for pid in children if is_fork_server(pid)]
            workers = [pid for server in servers for pid in children_of(server)]
            ranks = [pid for pid in children if pid not in servers]
            for kind, pids in (("rank", ranks), ("fork", servers), ("grammar", workers)):
                found[kind] += filter(None, (Process.of(kind, pid) for pid in pids))
        return found

    def wait_until_idle(self, limit_s: float = 60.0) -> dict[str, Any]:
        """Wait until the model has no requests, at most `limit_s` seconds. Return the model's state then."""
        probe, deadline = Probe(Config.from_env(self.env)), time.monotonic() + limit_s
        while True:
            state = probe.state()
            is_busy = any(state[name] for name in ("num_open", "num_running", "num_waiting", "num_blocks_held"))
            if not is_busy or time.monotonic() > deadline:
                return state
            time.sleep(0.2)

    def footprint(self) -> Counter[str]:
        """Count the server's processes, files in its run directory and shared memory files on this machine. Files that
        only say that an engine has computed something are left out."""
        mark = f"RUN_DIR={self.run_dir.path}".encode()
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        of_server = [pid for pid in pids if mark in environment_of(pid).split(b"\0")]
        workers = [
            pid for pid in of_server if is_fork_server(pid) and (stat := read_stat(pid)) and is_fork_server(stat.parent)
        ]
        workers += [pid for pid in of_server if runs(pid, b"engine.images.worker")]
        return Counter(
            processes=len(of_server) - len(workers),
            workers=len(workers),
            files=sum(path.is_file() and path.suffix != ".progress" for path in self.run_dir.path.rglob("*")),
            shm=sum(name.startswith(self.run_dir.shm_prefix) for name in os.listdir("/dev/shm")),
        )

    def footprint_at_the_end(self) -> Counter[str]:
        """Return the footprint once no process is left, or after a few seconds. The kernel kills grammar workers when
        their fork server has ended, which `stop_server` does not wait for."""
        deadline = time.monotonic() + END_S
        while (left := self.footprint())["processes"] and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    async def disturb(self, ledger: Ledger, victims: list[tuple[str, str]], every_s: float, until: float) -> None:
        """Disturb a random one of `victims`, pairs of `kill` or `stop` and a kind of process, about every `every_s`
        seconds."""
        while victims:
            await asyncio.sleep(random.uniform(0.5, 1.5) * every_s)
            if time.monotonic() > until:
                return
            action, kind = random.choice(victims)
            if not (old_enough := [process for process in self.processes()[kind] if age_s(process) > MIN_AGE_S]):
                continue
            victim = random.choice(old_enough)
            ledger.strike(f"{action} {kind}", time.monotonic())
            victim.kill(signal.SIGKILL if action == "kill" else signal.SIGSTOP)
            if action == "stop":
                await asyncio.sleep(random.uniform(0.5, 3.0))
                victim.kill(signal.SIGCONT)
            elif kind == "supervisor":
                await asyncio.to_thread(self.start)


def is_fork_server(pid: int) -> bool:
    """Return whether the process has the command line of a fork server of grammar workers, which its workers share."""
    return runs(pid, b"engine.grammars.fork_server")


def runs(pid: int, module: bytes) -> bool:
    """Return whether the command line of a process has the name of a module."""
    with contextlib.suppress(OSError):
        return module in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def age_s(process: Process) -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_time / os.sysconf("SC_CLK_TCK")


def environment_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""
