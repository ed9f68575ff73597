"""The storm's server: the real one on ports of its own, what can be seen of it from outside, and who disturbs it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from benchmarks.storm.ledger import Ledger
from engine.settings.config import Config
from server_scripts.probe import Probe
from server_scripts.run_dir import Process, RunDir, children_of

PORTS = ("HEALTH_HTTP_PORT", "SERVICE_GRPC_PORT", "METRICS_HTTP_PORT", "SERVICE_HTTP_PORT")
KINDS = ("engine", "rank", "stub", "tritonserver", "gateway", "health", "supervisor")
MIN_AGE_S = 2.0  # of a victim: one that has not begun to work tells nothing


class Server:
    def __init__(self, folder: Path, settings: dict[str, str]):
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.env = os.environ | {name: str(port) for name, port in self.ports.items()}
        self.env |= {"RUN_DIR": f"{folder}/run", "FD_LOG_DIR": f"{folder}/log", "SERVICE_HOST": "127.0.0.1", **settings}
        self.run_dir = RunDir(folder / "run")

    def start(self) -> None:
        subprocess.run([sys.executable, "-m", "server_scripts.start"], env=self.env, check=True, stdout=sys.stderr)

    def stop(self) -> None:
        subprocess.run([sys.executable, "-m", "server_scripts.stop", "10"], env=self.env, check=True, stdout=sys.stderr)

    def processes(self) -> dict[str, list[Process]]:
        """Of each kind, as the state file has them."""
        found: dict[str, list[Process]] = defaultdict(list)
        if state := self.run_dir.read_state():
            for process in (state.supervisor, *state.processes):
                name = "stub" if process.name == "tritonserver helper" else process.name.partition("-")[0]
                found[name].append(process)
        for engine in found["engine"]:
            found["rank"] += filter(None, (Process.of("rank", pid) for pid in children_of(engine.pid)))
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
        environments = map(environment_of, filter(str.isdecimal, os.listdir("/proc")))
        return Counter(
            processes=sum(mark in environment.split(b"\0") for environment in environments),
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


def age_s(process: Process) -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_time / os.sysconf("SC_CLK_TCK")


def environment_of(pid: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to clients: one of these could take a port while its process is down."""
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(10000, 20000)
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)):
                found.add(port)
    return list(found)
