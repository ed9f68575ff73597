"""Watches a server from a process of its own: the memory of each kind of process, and how soon GET ready answers."""

from __future__ import annotations

import http.client
import os
import statistics
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.storm.server import Server

ASK_EVERY_S, LOOK_EVERY_S = 0.1, 2.0
MB = 2**20


def watch(server: Server, until_told: Connection) -> None:
    """Sends what it has seen: MB of each kind in the order of time, milliseconds of each question, number of noes."""
    memory: dict[str, list[float]] = defaultdict(list)
    ready_ms: list[float] = []
    num_not_ready, look_at = 0, 0.0
    while not until_told.poll(ASK_EVERY_S):
        started = time.perf_counter()
        num_not_ready += not is_ready(server.ports["HEALTH_HTTP_PORT"])
        ready_ms.append(1e3 * (time.perf_counter() - started))
        if time.monotonic() > look_at:
            look_at = time.monotonic() + LOOK_EVERY_S
            for kind, processes in server.processes().items():
                if size := sum(resident_mb(process.pid) for process in processes):
                    memory[kind].append(size)
    until_told.send((dict(memory), ready_ms, num_not_ready))


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def resident_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB
    except OSError:
        return 0.0


def growth(samples: list[float]) -> tuple[float, float, float]:
    """The medians of the last two quarters, as a process that was killed is small at first; and the share between."""
    half, quarter = len(samples) // 2, (len(samples) + 3) // 4
    before, after = statistics.median(samples[half : half + quarter]), statistics.median(samples[-quarter:])
    return before, after, after / before - 1
