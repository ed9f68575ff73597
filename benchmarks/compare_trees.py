"""Effect of a change on speed: the engines of two or more trees of this project in turn, on the same weights.

    git worktree add ../before main~1
    python -m benchmarks.compare_trees build/bench/exported/qwen2.5-0.5b-... ../before . --cases 1x32x32 8x32x16

With --http the server of this tree takes turns, too, with a client for each request, which shows the cost of the path
to the clients.

    python -m benchmarks.compare_trees build/bench/exported/qwen2.5-0.5b-... . --http --cases 1x128x64 8x128x64

A machine drifts within a minute by more than most changes gain. So the engines of all trees are loaded, and each
answers a case of about a second while the others wait. For each tree the benchmark prints its median and, relative to
the first tree, the median of the ratios of adjacent turns with their quartiles. Every tree compiles its own ops.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.bench import MAX_TOKENS_IN_STEP, prompt_ids, run_case, run_streams, settings_for
from benchmarks.server import running_server
from engine.core.loop import EngineLoop
from engine.executors import make_executor
from engine.exporting.manifest import Manifest
from engine.garbage import collect_garbage_seldom
from engine.settings.config import Config

RATES = ("prefill_tok_s", "decode_tok_s", "output_tok_s")  # over HTTP only the last one
Turns = Mapping[str, list[dict[str, float]]]  # by tree or "HTTP"


def take_turns(graph_dir: Path, most: tuple[int, int]) -> None:
    """Run the engine of one tree and answer each case read from stdin. `most` is the largest number of requests, and of
    tokens of a request."""
    most_requests, longest = most
    limits = Config(max_num_batched_tokens=MAX_TOKENS_IN_STEP, batch_size=most_requests)
    config, model = replace(limits, enable_prefix_caching=False), Manifest.read(graph_dir)
    executor = make_executor(graph_dir, config)
    collect_garbage_seldom()
    num_blocks = most_requests * (longest // executor.block_size + 2)
    executor.allocate(num_blocks)
    for line in sys.stdin:
        case = numbers(line)
        print(json.dumps(run_case(EngineLoop(executor, num_blocks, config), model.vocab_size, case)), flush=True)


def numbers(case: str) -> tuple[int, int, int]:
    """Parse a case. `bench` is not imported for this, because each tree has its own version of it."""
    num_requests, prompt_len, answer_len = map(int, case.split("x"))
    return num_requests, prompt_len, answer_len


class Tree:
    def __init__(self, path: str, graph_dir: Path, most: tuple[int, int]):
        command = [sys.executable, __file__, str(graph_dir.resolve()), "--worker", *map(str, most)]
        environ = os.environ | {"PYTHONPATH": path}
        self._process = subprocess.Popen(
            command, cwd=path, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def turn(self, case: str) -> dict[str, float]:
        assert self._process.stdin and self._process.stdout
        print(case, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


class Clients:
    """Clients of the server at `port`."""

    def __init__(self, port: int, vocab_size: int):
        self._port, self._vocab_size = port, vocab_size

    def turn(self, case: str) -> dict[str, float]:
        num_requests, prompt_len, answer_len = numbers(case)
        rng = np.random.default_rng(0)
        prompts = [prompt_ids(rng, self._vocab_size, prompt_len) for _ in range(num_requests)]
        return asyncio.run(run_streams(self._port, prompts, answer_len, rate=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph_dir", type=Path)
    parser.add_argument("trees", nargs="*")
    parser.add_argument("--cases", nargs="+", default=["1x32x32", "8x32x16", "32x128x2"])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--http", action="store_true", help="measure the server of this tree over HTTP as well")
    parser.add_argument("--worker", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        take_turns(args.graph_dir, args.worker)
        return
    cases = [numbers(case) for case in args.cases]
    most = max(case[0] for case in cases), max(case[1] + case[2] for case in cases)
    takers: dict[str, Tree | Clients] = {path: Tree(os.path.abspath(path), args.graph_dir, most) for path in args.trees}
    with contextlib.ExitStack() as stack:
        if args.http:
            server = stack.enter_context(running_server(settings_for(args.graph_dir, most[0])))
            port, vocab_size = server.ports["SERVICE_HTTP_PORT"], Manifest.read(args.graph_dir).vocab_size
            takers["HTTP"] = Clients(port, vocab_size)
        for case in args.cases:
            turns: Turns = {name: [] for name in takers}
            for number in range(args.turns + 1):
                for name in sorted(takers, reverse=number % 2 == 1):
                    turns[name].append(takers[name].turn(case))
            for rate in RATES:
                names = [name for name in takers if rate in turns[name][0]]
                print(f"{case:12}{rate:15}", "   ".join(cell_of(turns, name, rate) for name in names), flush=True)


def cell_of(turns: Turns, name: str, rate: str) -> str:
    """Return a tree's median and its ratio to the first tree. The first turn, which allocates the buffers, is not
    counted."""
    own, first = ([turn[rate] for turn in turns[each][1:]] for each in (name, next(iter(turns))))
    text = f"{name} {statistics.median(own):.1f}"
    if own == first:
        return text
    low, middle, high = statistics.quantiles([a / b for a, b in zip(own, first, strict=True)], n=4)
    return f"{text} ({middle:.3f} of the first, {low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
