"""Effect of clients that send hostile grammars on the other clients of a server.

    python -m benchmarks.hostile_clients --seconds 120

16 clients send ordinary requests, with and without grammars, first beside a process that keeps one core busy, then
beside 16 clients that send hostile grammars only. Only grammar workers may die, no ordinary request may fail, the p99
latency of ordinary requests may double, and memory may grow by 5%. The last line is JSON; the exit status is 1 if a
condition does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.storm.clients import Clients, a_hostile_request, a_request
from benchmarks.storm.server import StormServer
from benchmarks.storm.watch import resident_mb
from engine.grammars.compiler import IDLE_S, LOOK_EVERY_S

NUM_CLIENTS = 16
KINDS = ("engine", "fork", "stub", "tritonserver", "gateway", "health", "supervisor")  # none of these may die
MAX_SLOWDOWN, MAX_GROWTH = 2.0, 1.05


class Measured:
    """Latencies of ordinary requests, and how requests ended."""

    def __init__(self) -> None:
        self.latencies_s: list[float] = []
        self.errors: Counter[str] = Counter()  # of ordinary requests
        self.hostile: Counter[str] = Counter()

    def p99_ms(self) -> float:
        return 1e3 * statistics.quantiles(self.latencies_s, n=100)[98]


async def load(server: StormServer, seconds: float, num_hostile: int) -> Measured:
    """Run the clients for some seconds."""
    found, until = Measured(), time.monotonic() + seconds
    clients = Clients(server.ports["SERVICE_HTTP_PORT"], server.ports["SERVICE_GRPC_PORT"])

    async def ask(fields: dict[str, Any]) -> str:
        [part] = [part async for part in clients.whole(fields | {"req_id": os.urandom(6).hex()})]
        return part.error

    async def ordinary(rng: random.Random) -> None:
        while time.monotonic() < until:
            started = time.monotonic()
            if error := await ask(a_request(rng)):
                found.errors[error] += 1
            found.latencies_s.append(time.monotonic() - started)

    async def hostile(rng: random.Random) -> None:
        while time.monotonic() < until:
            found.hostile[await ask(a_hostile_request(rng)) or "answered"] += 1

    try:
        await asyncio.gather(
            *(ordinary(random.Random(index)) for index in range(NUM_CLIENTS)),
            *(hostile(random.Random(-1 - index)) for index in range(num_hostile)),
        )
    finally:
        await clients.close()
    return found


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    process = multiprocessing.Process(target=_spin, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _spin() -> None:
    while True:
        pass


def memory_mb(server: StormServer) -> dict[str, float]:
    """Return the resident memory of each kind of process, once idle grammar workers have ended."""
    server.wait_until_idle()
    time.sleep(IDLE_S + 2 * LOOK_EVERY_S)
    return {
        kind: round(sum(resident_mb(each.pid) for each in processes), 1)
        for kind, processes in server.processes().items()
    }


def pids(server: StormServer) -> dict[str, set[int]]:
    processes = server.processes()
    return {kind: {each.pid for each in processes[kind]} for kind in KINDS}


def measure(server: StormServer, seconds: float) -> dict[str, Any]:
    """Return the figures of a server that has just started."""
    asyncio.run(load(server, min(seconds, 20), 0))  # warms up
    with busy_core():
        calm = asyncio.run(load(server, seconds, 0))
    before_mb, before = memory_mb(server), pids(server)
    attacked = asyncio.run(load(server, seconds, NUM_CLIENTS))
    after, after_mb = pids(server), memory_mb(server)
    return {
        "ordinary requests": len(attacked.latencies_s),
        "failed ordinary requests": dict(calm.errors + attacked.errors),
        "hostile requests": dict(attacked.hostile),
        "p99 beside a busy core, ms": round(calm.p99_ms(), 1),
        "p99 beside hostile clients, ms": round(attacked.p99_ms(), 1),
        "slowdown": round(attacked.p99_ms() / calm.p99_ms(), 3),
        "memory before, MB": before_mb,
        "memory after, MB": after_mb,
        "growth": round(sum(after_mb.values()) / sum(before_mb.values()), 3),
        "died": sorted(kind for kind in KINDS if before[kind] != after[kind]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120, help="duration of each of the two loads")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = StormServer(Path(folder), {"MODEL_DIR": "demo_model"})
        server.start()
        try:
            figures = measure(server, given.seconds)
        finally:
            server.stop()
    print(json.dumps(figures))
    is_right = not figures["failed ordinary requests"] and not figures["died"]
    sys.exit(not (is_right and figures["slowdown"] <= MAX_SLOWDOWN and figures["growth"] <= MAX_GROWTH))


if __name__ == "__main__":
    main()
