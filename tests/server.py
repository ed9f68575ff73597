"""A real server for tests: start_server and stop_server with ports, run directory and logs of their own."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from server_scripts.run_dir import Process, RunDir, ServerState

ROOT = Path(__file__).resolve().parents[1]
PORTS = ("HEALTH_HTTP_PORT", "SERVICE_GRPC_PORT", "METRICS_HTTP_PORT", "SERVICE_HTTP_PORT")
TIMEOUT_S = 300
_run, _worker, _num_workers = os.getpid(), 0, 1
if "PYTEST_XDIST_WORKER" in os.environ:  # test workers of one run take turns
    _run, _worker = os.getppid(), int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    _num_workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
# Runs that begin at one time have process ids that are near each other.
_candidates = itertools.count(20000 + _run * 1009 % 10000 + _worker, _num_workers)


@dataclass(frozen=True)
class RunningServer:
    env: dict[str, str]
    ports: dict[str, int]
    run_dir: Path
    log_dir: Path

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['SERVICE_HTTP_PORT']}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.ports['SERVICE_GRPC_PORT']}"

    @property
    def health_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['HEALTH_HTTP_PORT']}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['METRICS_HTTP_PORT']}/metrics"

    def pid_of(self, name: str) -> int:
        """Return the pid of `engine`, `tritonserver`, `stub`, `gateway-0`, `health` or `supervisor`. Raises LookupError
        while it is down.
        """
        state = json.loads((self.run_dir / "state.json").read_text())
        pids = {process["name"]: process["pid"] for process in (state["supervisor"], *state["processes"])}
        return pids["tritonserver helper" if name == "stub" else name]

    def command(self, name: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Run `start_server` or `stop_server` with the environment of this server."""
        command = [sys.executable, "-m", f"server_scripts.{name.removesuffix('_server')}", *arguments]
        return subprocess.run(command, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)


def is_alive(pid: int) -> bool:
    """Return whether a process runs. One that has ended and was not reaped yet does not."""
    process = Process.of("", pid)
    return process is not None and process.is_alive


@contextmanager
def running_replicas(folder: Path, settings: dict[str, str]) -> Iterator[list[RunningServer]]:
    """Yield two servers with the same settings that are replicas of each other."""
    both = [a_server(folder / str(i), settings) for i in range(2)]
    for each in both:
        each.env["REPLICAS"] = ",".join(other.grpc_url for other in both)
    try:
        for each in both:
            started = each.command("start_server")
            assert started.returncode == 0, started.stdout + started.stderr
        yield both
    finally:
        for each in both:
            each.command("stop_server", "0")


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Pause a process for the duration of the context. A paused engine accepts requests and does not answer them, so
    they are open for as long as a test needs. The supervisor ends an engine that is paused for ENGINE_SILENT_S."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # the supervisor has ended it; the next engine continues
            os.kill(pid, signal.SIGCONT)


def state_of(server: RunningServer) -> ServerState | None:
    return RunDir(server.run_dir).read_state()


def pids_of(state: ServerState) -> list[int]:
    return [state.supervisor.pid, *(process.pid for process in state.processes)]


def is_clean(server: RunningServer, state: ServerState) -> bool:
    """Return whether no process, shared memory or state is left."""
    left = list(Path("/dev/shm").glob(f"{RunDir(server.run_dir).shm_prefix}*"))
    return not left and state_of(server) is None and not any(map(is_alive, pids_of(state)))


def free_ports(count: int) -> list[int]:
    """Return ports that are not in use, below those that the kernel gives to clients. None is returned twice."""
    found: list[int] = []
    while len(found) < count:
        number = next(_candidates)
        with socket.socket() as sock:
            try:
                sock.bind(("0.0.0.0", number))
            except OSError:
                continue
        found.append(number)
    return found


def a_server(folder: Path, env: Mapping[str, str]) -> RunningServer:
    """Return a server that does not run yet."""
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    settings = {name: str(port) for name, port in ports.items()}
    settings |= {"RUN_DIR": str(folder / "run"), "FD_LOG_DIR": str(folder / "log"), "START_TIMEOUT": "240"}
    settings |= {"DRAIN_DELAY": "0"}  # there is no load balancer here
    settings |= {"SERVICE_HOST": "127.0.0.1", "EXPORT_CACHE_DIR": str(ROOT / "build" / "exported-by-tests")}
    settings |= {"MODEL_DIR": str(ROOT / "demo_model"), **env}
    return RunningServer({**os.environ, **settings}, ports, folder / "run", folder / "log")


@contextmanager
def running_server(folder: Path, env: Mapping[str, str], stop_within: str = "0") -> Iterator[RunningServer]:
    """Run a server that is ready. At the end it is stopped without waiting for its requests: an orderly end takes
    seconds and has tests of its own."""
    server = a_server(folder, env)
    started = server.command("start_server")
    assert started.returncode == 0, started.stdout + started.stderr
    try:
        yield server
    finally:
        stopped = server.command("stop_server", stop_within)
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
