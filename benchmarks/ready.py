"""Latency of GET ready while a cold server answers many streams at once, over HTTP.

    python -m benchmarks.ready --streams 2000

A trivial server that always answers yes is queried alternately with it, in a process started in the same way as the
clients: its latency is the wait for a core. The prober stands for a client on another machine, so it runs with
real-time priority if it may (as root) and does not wait for a core. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.server
import json
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from multiprocessing.connection import Connection

from benchmarks.bench import cpu_name
from benchmarks.http_overhead import body_of, over_http
from benchmarks.server import running_server
from benchmarks.storm.watch import is_ready
from gateway.connection_limits import allow_connections

ASK_EVERY_S = 0.05
HEALTH, YES = "GET ready", "a server that says yes"


class SaysYes(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def say_yes(port_sender: Connection) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), SaysYes) as server:
        port_sender.send(server.server_port)
        server.serve_forever()


def ask(ports: dict[str, int], stop: Connection) -> None:
    """Query each port until a message arrives. Send the latencies in milliseconds by name, and the number of negative
    answers."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    taken_ms: dict[str, list[float]] = defaultdict(list)
    num_not_ready = 0
    while not stop.poll(ASK_EVERY_S):
        for name, port in ports.items():
            began = time.perf_counter()
            num_not_ready += not is_ready(port)
            taken_ms[name].append(1e3 * (time.perf_counter() - began))
    stop.send((dict(taken_ms), num_not_ready))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo_model")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--answer-len", type=int, default=64)
    args = parser.parse_args()
    allow_connections()
    spawn = multiprocessing.get_context("spawn")
    settings = {"MODEL_DIR": os.path.abspath(args.model), "MAX_CACHED_TASK_NUM": str(args.streams)}
    with running_server(settings) as server:
        (yes, port_sender), (ours, theirs) = spawn.Pipe(), spawn.Pipe()
        spawn.Process(target=say_yes, args=(port_sender,), daemon=True).start()
        ports = {HEALTH: server.ports["HEALTH_HTTP_PORT"], YES: yes.recv()}
        spawn.Process(target=ask, args=(ports, theirs), daemon=True).start()
        began, bodies = time.monotonic(), [body_of(index, 16, args.answer_len) for index in range(args.streams)]
        asyncio.run(over_http(server.ports["SERVICE_HTTP_PORT"], bodies))
        seconds = time.monotonic() - began
        ours.send("enough")
        taken_ms, num_not_ready = ours.recv()
    report = {"streams": args.streams, "seconds": round(seconds, 1), "not_ready": num_not_ready}
    for name, taken in taken_ms.items():
        quantiles = statistics.quantiles(taken, n=100)
        print(f"{name:24} asked {len(taken)}, ", end="")
        print(f"p50 {quantiles[49]:.1f}, p99 {quantiles[98]:.1f}, longest {max(taken):.0f} ms")
        report[name] = {"p50_ms": quantiles[49], "p99_ms": quantiles[98]}
    print(json.dumps({"hardware": cpu_name(), **report}))


if __name__ == "__main__":
    main()
