"""Rate at which a decode instance pulls KV blocks from a prefill instance, without a model.

    python -m benchmarks.transfer --megabytes 256
    python -m benchmarks.transfer --megabytes 256 --transfer nixl    # needs pip install --no-deps nixl-cu13

As root, both have a network namespace of their own, with links of 1 Gbit/s to a bridge; otherwise they share the
loopback interface. A plain TCP connection over the same way is measured before and after. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.network import Network
from engine.core.prefill_jobs import PrefillJob
from engine.core.remote_prefill import Pull
from engine.core.types import Request, Sampling
from engine.executors.cpu.blocks import CpuBlocks
from engine.executors.nixl_blocks import NixlBlocks
from engine.settings.disaggregation import NIXL, TCP
from engine.transfer.client import PrefillClient, PulledBlocks
from engine.transfer.server import PrefillServer, ServedBlocks

BLOCK_BYTES, NUM_LAYERS = 1 << 20, 16
PORTS = 29571, 29572  # of the instance, and of the plain connection


class ReadyJobs:
    """Jobs whose blocks are all ready at once."""

    def begin(self, job: PrefillJob) -> None:
        job.block_ids |= {index: index for index in range(len(job.keys))}
        job.listener.ready(job, list(range(len(job.keys))))

    def end(self, job: PrefillJob) -> None:
        job.is_leased = False


def nixl_blocks(num_blocks: int, rng: np.random.Generator | None = None) -> NixlBlocks:
    """Return blocks in memory that NIXL reads, with random content or none."""
    # This process is reached over the bridge, and not from memory to memory as on one host.
    os.environ |= {"UCX_TCP_BRIDGE_ENABLE": "y", "UCX_TLS": "tcp,self"}
    caches = np.zeros((NUM_LAYERS, num_blocks, BLOCK_BYTES // NUM_LAYERS), np.uint8)
    if rng:
        caches[:] = rng.integers(256, size=caches.shape, dtype=np.uint8)
    return NixlBlocks(CpuBlocks(SimpleNamespace(num_steps=0), list(caches)))  # type: ignore[arg-type]


def serve(host: str, transfer: str, num_blocks: int) -> None:
    """Serve blocks, and bytes over a plain connection, until the standard input is closed."""
    content = os.urandom(BLOCK_BYTES)
    shared: tuple[Any, ...] = ()
    if transfer == NIXL:
        blocks = nixl_blocks(num_blocks, np.random.default_rng(1))
        shared = blocks.digests, blocks.share(), None, transfer
    jobs: Any = ReadyJobs()
    PrefillServer((host, PORTS[0]), ServedBlocks(jobs, lambda block: content, {}, 1 << 20, 1 << 20, *shared), "")
    listener = socket.create_server((host, PORTS[1]))

    def send() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                for _ in range(int.from_bytes(connection.recv(8), "little")):
                    connection.sendall(content)

    threading.Thread(target=send, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


def pull_s(client: PrefillClient, num_blocks: int) -> float:
    """Pull blocks and return the seconds that it takes."""
    request = Request("a", [1, 1], 2, Sampling(1))
    pull = Pull(request, [index.to_bytes(16, "little") for index in range(num_blocks)], range(num_blocks), (), 0)
    began = time.perf_counter()
    assert client.begin(pull)
    while not pull.has_ended:
        client.wait(0.1)
    assert len(pull.arrived) == num_blocks
    client.end(pull)
    return time.perf_counter() - began


def receive_s(host: str, num_blocks: int) -> float:
    began = time.perf_counter()
    with socket.create_connection((host, PORTS[1])) as connection:
        connection.sendall(num_blocks.to_bytes(8, "little"))
        while connection.recv(1 << 20):
            pass
    return time.perf_counter() - began


def measure(host: str, num_blocks: int, rounds: int, transfer: str) -> dict[str, Any]:
    ours = (nixl_blocks(num_blocks), True, None, transfer) if transfer == NIXL else ()
    memory = np.zeros((num_blocks, BLOCK_BYTES), np.uint8)

    def write(block: int, content: bytes | memoryview) -> None:
        memory[block] = np.frombuffer(content, np.uint8)

    client = PrefillClient([(host, PORTS[0])], PulledBlocks(write, BLOCK_BYTES, {}, *ours), "")
    while not client.is_ready:
        assert not client.refusals(0), client.refusals(0)
        time.sleep(0.01)
    ways: dict[str, Callable[[], float]] = {
        "plain": lambda: receive_s(host, num_blocks),
        "pull": lambda: pull_s(client, num_blocks),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    cpu_s = 0.0
    for _ in range(rounds):
        for name, way in ways.items():
            before = time.process_time()
            rates[name].append(8e-9 * num_blocks * BLOCK_BYTES / way())
            cpu_s += time.process_time() - before if name == "pull" else 0.0
    return {
        **{f"{name}_gbit_s": sorted(each)[len(each) // 2] for name, each in rates.items()},
        "cpu_s_per_256_mb": cpu_s / rounds / num_blocks * 256,
        "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transfer", choices=(TCP, NIXL), default=TCP)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.transfer, args.megabytes)
        return 0
    with Network(1) as network:
        host = network.address(0)
        command = [*network.enter(0), sys.executable, "-m", "benchmarks.transfer", "--serve", host]
        command += ["--transfer", args.transfer, "--megabytes", str(args.megabytes)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout and server.stdin
            server.stdout.readline()
            report = measure(host, args.megabytes, args.rounds, args.transfer)
            server.stdin.close()
    print(json.dumps({"megabytes": args.megabytes, "rounds": args.rounds, "namespaces": network.has_links, **report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
