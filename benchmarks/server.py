"""The real server, started for a benchmark with its own ports, run directory and logs."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from server_scripts.run_dir import RunDir

PORTS = ("HEALTH_HTTP_PORT", "SERVICE_GRPC_PORT", "METRICS_HTTP_PORT", "SERVICE_HTTP_PORT")


class Server:
    def __init__(self, folder: Path, settings: Mapping[str, str]):
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.env = os.environ | {name: str(port) for name, port in self.ports.items()}
        self.env |= {"RUN_DIR": f"{folder}/run", "FD_LOG_DIR": f"{folder}/log", "SERVICE_HOST": "127.0.0.1", **settings}
        self.run_dir = RunDir(folder / "run")

    def start(self) -> None:
        subprocess.run([sys.executable, "-m", "server_scripts.start"], env=self.env, check=True, stdout=sys.stderr)

    def stop(self) -> None:
        subprocess.run([sys.executable, "-m", "server_scripts.stop", "10"], env=self.env, check=True, stdout=sys.stderr)


@contextlib.contextmanager
def running_server(settings: Mapping[str, str]) -> Iterator[Server]:
    """Start a server with these settings, yield it when it is ready, and stop it at the end."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def free_ports(count: int) -> list[int]:
    """Return free ports below the range of ephemeral ports, from which a client could take a port while its process is
    down."""
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(10000, 20000)
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)):
                found.add(port)
    return list(found)
