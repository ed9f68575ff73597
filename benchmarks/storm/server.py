"""The storm's server: what can be seen of it from outside, and who disturbs it."""

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
MIN_AGE_S = 2.0  # of a victim: one that has not begun to work tells nothing


class StormServer(Server):
    def processes(self) -> dict[str, list[Process]]:
        """Of each kind, as the state file has them."""
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
        """-> what the model says of itself then, or after that time."""
        probe, deadline = Probe(Config.from_env(self.env)), time.monotonic() + limit_s
        while True:
            state = probe.state()
            is_busy = any(state[name] for name in ("num_open", "num_running", "num_waiting", "num_blocks_held"))
            if not is_busy or time.monotonic() > deadline:
                return state
            time.sleep(0.2)

    def footprint(self) -> Counter[str]:
        """What of it is on this machine now: processes, files of its run directory, and of shared memory."""
        mark = f"RUN_DIR={self.run_dir.path}".encode()
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        of_server = [pid for pid in pids if mark in environment_of(pid).split(b"\0")]
        workers = [
            pid for pid in of_server if is_fork_server(pid) and (stat := read_stat(pid)) and is_fork_server(stat.parent)
        ]
        return Counter(
            processes=len(of_server) - len(workers),
            workers=len(workers),
            files=sum(path.is_file() for path in self.run_dir.path.rglob("*")),
            shm=sum(name.startswith(self.run_dir.shm_prefix) for name in os.listdir("/dev/shm")),
        )

    async def disturb(self, ledger: Ledger, victims: list[tuple[str, str]], every_s: float, until: float) -> None:
        """Every so often one of `victims`, (`kill` or `stop`, kind of process), has it."""
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
    """Of grammar workers; these have its command line."""
    with contextlib.suppress(OSError):
        return b"engine.grammars.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def age_s(process: Process) -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_time / os.sysconf("SC_CLK_TCK")


def environment_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""
