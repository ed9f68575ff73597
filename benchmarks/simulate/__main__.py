"""Simulation of replicas: the real scheduler, KV cache manager and router on a logical clock.

    python -m benchmarks.simulate --replicas 3 --rate 20 --seconds 60 --failures 0.1
    python -m benchmarks.simulate --replicas 10000 --rate 10000 --seconds 60 --failures 0.01 --coarse
    python -m benchmarks.simulate --replicas 3 --clients 12 --requests 90 --front-ends
    python -m benchmarks.simulate --replicas 3 --clients 8 --requests 1500 --front-ends --chats
    python -m benchmarks.simulate --compare demo_model --rate 4 --seconds 60 --processor-time

Each step takes the time that --times gives for its tokens. --compare runs the same traffic on a real engine of this
process first, fits the times to its steps, and simulates one replica with them. Tokens of the traffic are four
characters each. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.simulate.coarse import simulate_coarsely
from benchmarks.simulate.real import Clock, ProcessorClock, RealEngine
from benchmarks.simulate.replicas import Cluster, Result, simulate
from benchmarks.simulate.step_time import StepTimes
from benchmarks.simulate.traffic import Arrival, arrivals, chats, new_prompts

DEMO_MODEL = StepTimes(7.7e-4, 4.3e-5, 1.5e-4, 5.3e-8)  # one thread of an EPYC core, see docs/machines.md


def summary(result: Result) -> dict[str, Any]:
    """Return the figures of a result."""
    found: dict[str, Any] = {"answers": len(result.e2e_s), "lost": result.num_lost}
    for name, values in (("ttft", result.ttft_s), ("e2e", result.e2e_s)):
        cuts = statistics.quantiles(values, n=100) if len(values) > 1 else values * 99
        found |= {f"{name}_p{p}_ms": round(1e3 * cuts[p - 1], 3) for p in (50, 90, 99) if cuts}
    counts = {"kills": result.num_kills, "continued": result.num_continued, "steps": result.num_steps}
    counts["forwarded"] = result.num_forwarded
    load = {"load_max_over_mean": round(result.load_max_over_mean, 4)} if result.loads else {}
    return {**found, **counts, "hit_rate": round(result.hit_rate, 4), **load}


def compare(args: argparse.Namespace, cluster: Cluster, traffic: list[Arrival]) -> dict[str, Any]:
    """Return the figures of a real engine and those of its simulation."""
    engine = RealEngine(args.compare, cluster, ProcessorClock() if args.processor_time else Clock())
    try:
        engine.run(traffic[:20])  # the first steps of a process are slow
        real, steps = engine.run(traffic)
    finally:
        engine.close()
    times = StepTimes.fitted(steps)
    simulated = simulate(replace(cluster, num_replicas=1, times=times), traffic)
    figures = {"times": asdict(times), "real": summary(real), "simulated": summary(simulated)}
    for name in ("ttft", "e2e"):
        real_s, simulated_s = (statistics.median(getattr(each, f"{name}_s")) for each in (real, simulated))
        figures[f"{name}_error"] = round(simulated_s / real_s - 1, 4)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second, of all replicas together")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the arrivals")
    parser.add_argument("--answer", type=int, default=64, help="mean tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=float, default=0.0, help="share of the replicas that fails per minute")
    parser.add_argument("--restart-s", type=float, default=30.0, help="seconds until a failed replica is back")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--blocks", type=int, default=2000, help="KV cache blocks of a replica, of 64 tokens")
    names = ("STEP", "PROMPT_TOKEN", "ANSWER_TOKEN", "POSITION")
    parser.add_argument(
        "--times", nargs=4, type=float, metavar=names, help="seconds of a step; default: the demo model on a CPU"
    )
    parser.add_argument("--front-ends", action="store_true", help="the replicas are the front ends, in turn")
    parser.add_argument("--clients", type=int, default=0, help="that wait for their answers, with prompts of no chat")
    parser.add_argument("--requests", type=int, default=90, help="of these clients")
    parser.add_argument("--chats", action="store_true", help="these clients ask 20 applications with system prompts")
    parser.add_argument("--coarse", action="store_true", help="do not simulate steps: for thousands of replicas")
    parser.add_argument("--compare", type=Path, metavar="MODEL", help="run the traffic on a real engine as well")
    parser.add_argument("--processor-time", action="store_true", help="with --compare: that of the engine, one thread")
    args = parser.parse_args()
    if args.replicas < 1 or min(args.rate, args.seconds, args.answer, args.batch_size, args.blocks) <= 0:
        parser.error("--replicas, --rate, --seconds, --answer, --batch-size and --blocks must be positive")
    times = StepTimes(*args.times) if args.times else DEMO_MODEL
    if args.front_ends and (args.failures or args.coarse) or args.clients and (args.compare or args.coarse):
        parser.error("--front-ends and --clients work with neither --coarse, --failures nor --compare")
    cluster = Cluster(args.replicas, times, args.blocks, args.batch_size, args.failures, args.restart_s)
    cluster = replace(cluster, are_front_ends=args.front_ends, num_clients=args.clients)
    traffic = arrivals(args.seed, args.rate, args.seconds, args.answer)
    if args.clients:
        traffic = chats(args.seed, args.requests) if args.chats else new_prompts(args.seed, args.requests, args.answer)
    began = time.perf_counter()
    run = simulate_coarsely if args.coarse else simulate
    figures = compare(args, cluster, list(traffic)) if args.compare else summary(run(cluster, traffic, args.seed))
    options = {name: value for name, value in vars(args).items() if name not in ("compare", "times")}
    print(json.dumps({**options, **figures, "took_s": round(time.perf_counter() - began, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
