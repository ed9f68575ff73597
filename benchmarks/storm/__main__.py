"""Stress test of the real server: many clients, random kills and stops of its processes, and an oracle. `make storm`,
or

    python -m benchmarks.storm --seconds 300 --kill engine --stop engine --every 10

First, without disturbance, an oracle of right answers (greedy and seeded) is recorded. Then --clients clients repeat
these requests, each time in a random protocol: some disconnect early, some read slowly, some use grammars. Bad requests
and hostile grammars are mixed in, and every ten seconds there is a burst of more requests than the server accepts; bad
requests, and those of a burst that exceed the limit, count as refused. A client that was cut off or got an error asks
again with the same req_id for the missing part (`resume_from`, or `Last-Event-ID`), which is counted. Kinds of
processes to --kill and to --stop (SIGSTOP, and SIGCONT a little later): engine, rank, fork (server of grammar workers),
grammar (worker), stub, tritonserver, gateway, health, supervisor (which is started again, as an init system would).

The exit status is 1 when a request was lost or answered wrongly, when resources are left behind, when memory has grown
by more than --max-growth, or when the death of a process other than a gateway caused more than a pause. A table shows
the effects of each kind of death. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.storm.clients import Clients
from benchmarks.storm.ledger import Ledger
from benchmarks.storm.load import BATCH_SIZE, MAX_WAITING, Load
from benchmarks.storm.server import KINDS, StormServer
from benchmarks.storm.watch import growth, watch

DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo_model"


async def storm(server: StormServer, ledger: Ledger, args: argparse.Namespace) -> Any:
    """Run the clients and the disturbances. Return the observations of `watch`."""
    clients = Clients(server.ports["SERVICE_HTTP_PORT"], server.ports["SERVICE_GRPC_PORT"])
    load = Load(clients, ledger, random.Random(args.seed), args.images)
    await load.make_cases(args.answers)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    spawn.Process(target=watch, args=(server, theirs), daemon=True).start()
    until = time.monotonic() + args.seconds
    victims = [("kill", kind) for kind in args.kill] + [("stop", kind) for kind in args.stop]
    asking = [load.client(until, args.leave) for _ in range(args.clients)]
    await asyncio.gather(load.bursts(until), server.disturb(ledger, victims, args.every, until), *asking)
    ours.send("enough")
    await clients.close()
    return ours.recv()


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Run the stress test on a new server. Return the report and the list of broken promises."""
    ledger = Ledger()
    settings = {"MODEL_DIR": str(args.model), "BATCH_SIZE": str(BATCH_SIZE), "MAX_CACHED_TASK_NUM": str(MAX_WAITING)}
    settings |= {"PUSH_MODE_HTTP_WORKERS": "2", "ENGINE_MAX_CRASHES": "1000", "MP_NUM": str(args.mp_num)}
    settings["DATA_PARALLEL_SIZE"] = str(args.data_parallel_size)
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        server = StormServer(Path(folder), settings)
        server.start()
        try:
            before = server.footprint()
            samples, answered_ms, num_not_ready = asyncio.run(storm(server, ledger, args))
            idle = server.wait_until_idle()
            after = server.footprint()
        finally:
            server.stop()
        stopped = server.footprint_at_the_end()
    held = {"blocks": idle["num_blocks_held"], "requests": idle["num_open"]}
    memory = {kind: growth(sizes) for kind, sizes in samples.items()}
    broken = ledger.broken_promises() + [f"{count} {what} are still held" for what, count in held.items() if count]
    stays = {"files": before["files"]}  # generated configuration files remain
    memory.pop("grammar", None)  # its size depends on the grammar
    before["workers"] = after["workers"]  # some are kept for the next request with the same grammar, or with an image
    broken += [f"left behind: {dict(more)}" for more in (after - before, stopped - Counter(stays)) if more]
    broken += [f"{kind} has grown by {grown:.1%}" for kind, (_, _, grown) in memory.items() if grown > args.max_growth]
    quantiles = statistics.quantiles(answered_ms, n=100)
    ready = {"asked": len(answered_ms), "not": num_not_ready, "p50_ms": quantiles[49], "p99_ms": quantiles[98]}
    left = {"before": before, "after": after, "stopped": stopped}
    return {**ledger.report(), "held": held, "left": left, "memory_mb": memory, "ready": ready}, broken


def print_table(report: dict[str, Any]) -> None:
    for name in ("requests", "attempts", "errors", "held"):
        print(f"{name:10}" + ", ".join(f"{what} {count}" for what, count in sorted(report[name].items())))
    print("\ndisturbance        times   open   paused   longest s   error   cut   refused after it")
    for kind, effect in sorted(report["effects"].items()):
        print(
            f"{kind:18}{effect['times']:6}{effect['open']:7}{effect['paused']:9}{effect['longest_s']:12.1f}"
            f"{effect['error']:8}{effect['cut']:6}{effect['refused']:19}"
        )
    print("\nlongest waits")
    for line in report["slowest"]:
        print(f"  {line}")
    print("\n           processes   files in RUN_DIR   in /dev/shm")
    for when, left in report["left"].items():
        print(f"{when:11}{left['processes']:9}{left['files']:19}{left['shm']:14}")
    print("\na process, MB    before   after   growth")
    for kind, (before, after, grown) in report["memory_mb"].items():
        print(f"{kind:15}{before:8.0f}{after:8.0f}{grown:9.1%}")
    ready = report["ready"]
    print(f"\nGET ready  asked {ready['asked']}, not ready {ready['not']}, p50 {ready['p50_ms']:.1f} ms, ", end="")
    print(f"p99 {ready['p99_ms']:.1f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--kill", nargs="*", default=["engine"], choices=KINDS, metavar="KIND")
    parser.add_argument("--stop", nargs="*", default=[], choices=KINDS, metavar="KIND")
    parser.add_argument("--every", type=float, default=10, help="mean seconds between two kills or stops")
    parser.add_argument("--leave", type=float, default=0.15, help="share of the requests whose clients leave")
    parser.add_argument("--answers", type=int, default=200, help="number of different answers to compare with")
    parser.add_argument(
        "--max-growth", type=float, default=math.inf, help="of the memory of processes as old: 0.02 is 2%%"
    )
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--mp-num", type=int, default=1)
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests")
    parser.add_argument("--images", type=float, default=0.0, help="share of the requests with images")
    report, broken = run(parser.parse_args())
    print_table(report)
    for promise in broken:
        print(f"BROKEN: {promise}")
    print(json.dumps(report | {"broken": broken}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
