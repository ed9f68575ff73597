"""Decode speed on CPUs as a share of the memory limit: `python -m benchmarks.decode --shape qwen3-moe-0.8b`.

Weights are random (LOAD_FORMAT=dummy). In turn, all threads read memory, and answers are decoded with each batch
size. The limit of a step is the time to read what it needs: weights, of experts only those that its tokens choose, and
the cached keys and values. Compared are the fastest read and the fastest step of all rounds, which other load on the
machine disturbs least. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import statistics
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.bench import cpu_name, prompt_ids
from benchmarks.kernels import limits_library
from benchmarks.random_checkpoint import SHAPES, write_shape
from engine import graph
from engine.core.executor import Executor
from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.executors import make_executor
from engine.executors.cpu.fp8_weights import with_bf16_weights
from engine.executors.cpu.program import large_pages
from engine.executors.reference import ReferenceExecutor
from engine.exporting.cache import export_cached
from engine.exporting.export import QUANT_TYPES, ExportOptions
from engine.exporting.manifest import Manifest
from engine.ops import cpu
from engine.settings.config import Config

PROMPT_LEN, ANSWER_LEN, COUNTED_LEN = 128, 40, 4
NUM_BLOCKS = 200
READ_BYTES = 1 << 28  # more than a cache holds


def loop_of(executor: Executor, batch: int, vocab_size: int, answer_len: int) -> EngineLoop:
    """Return a loop whose requests have been computed up to their first tokens."""
    config = Config(batch_size=batch, max_num_batched_tokens=PROMPT_LEN * batch, enable_prefix_caching=False)
    loop, rng = EngineLoop(executor, NUM_BLOCKS, config), np.random.default_rng(0)
    for index in range(batch):
        ids = prompt_ids(rng, vocab_size, PROMPT_LEN)
        loop.add(Request(str(index), ids, PROMPT_LEN, Sampling(max_new_tokens=answer_len, temperature=0)))
    loop.step()
    return loop


def fastest_step(executor: Executor, batch: int, vocab_size: int) -> float:
    """Return the seconds of the fastest decode step of some."""
    loop, times = loop_of(executor, batch, vocab_size, ANSWER_LEN), []
    while not loop.is_idle:
        started = time.perf_counter()
        loop.step()
        times.append(time.perf_counter() - started)
    return min(times[1:-1])


def experts_hit(graph_dir: Path, batch: int, vocab_size: int) -> float:
    """Return how many different experts of a layer the tokens of a decode step choose, on average."""
    counts: list[int] = []

    def moe_route(*inputs: Any, **attributes: Any) -> Any:
        ids, weights = cpu.moe_route(*inputs, **attributes)
        if len(ids) == batch:  # not a prompt
            counts.append(len(np.unique(ids)))
        return ids, weights

    ops = ModuleType("counting")
    vars(ops).update(__getattr__=cpu.__getattr__, moe_route=moe_route)
    executor = ReferenceExecutor(graph_dir, ops)
    executor.allocate(NUM_BLOCKS)
    loop = loop_of(executor, batch, vocab_size, COUNTED_LEN)
    while not loop.is_idle:
        loop.step()
    return statistics.mean(counts) if counts else 0.0


def bytes_of_step(graph_dir: Path, batch: int, num_hit: float) -> float:
    """Return the bytes that a decode step has to read."""
    program, params = with_bf16_weights(*graph.load(graph_dir))
    names = {value.id: name for name, value in program.parameters.items()}
    shares: dict[str, float] = {}
    for node in program.nodes:
        share = num_hit / int(node.attributes["num_experts"]) if node.op.startswith("expert_") else 1.0
        share = 0.0 if node.op == "embedding" else share
        for name in (names[value.id] for value in node.inputs if value and value.id in names):
            shares[name] = max(shares.get(name, 0.0), share)
    manifest = Manifest.read(graph_dir)
    of_token = sum(cache.block_bytes for cache in manifest.graph().caches) / manifest.block_size
    context = PROMPT_LEN + ANSWER_LEN / 2
    return sum(share * params[name].nbytes for name, share in shares.items()) + batch * context * of_token


def measure(graph_dir: Path, batches: list[int], rounds: int, threads: int) -> list[dict[str, Any]]:
    """Return the figures of a format, for each batch size."""
    vocab_size = Manifest.read(graph_dir).vocab_size
    hit = {batch: experts_hit(graph_dir, batch, vocab_size) for batch in batches}
    sizes = {batch: bytes_of_step(graph_dir, batch, hit[batch]) for batch in batches}
    executor = make_executor(graph_dir, Config(device="cpu", batch_size=max(batches), cpu_threads=threads))
    executor.allocate(NUM_BLOCKS)
    data = large_pages(READ_BYTES)
    data[:] = 1
    place = ctypes.c_void_p(data.ctypes.data), ctypes.c_int64(data.size // 8)
    bandwidths, steps = [], dict.fromkeys(batches, math.inf)
    for _ in range(rounds):
        for batch in batches:
            bandwidths += [
                limits_library().read_bandwidth(cpu.num_threads(), *place, streams) for streams in 4 * (1, 2, 4)
            ]
            steps[batch] = min(steps[batch], fastest_step(executor, batch, vocab_size))
    executor.close()
    most, rows = max(bandwidths), []
    for batch, step in steps.items():
        row = {"batch": batch, "experts_hit": hit[batch], "mb": sizes[batch] / 1e6, "tok_s": batch / step}
        rows.append(row | {"gb_s": most / 1e9, "share": sizes[batch] / most / step})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-moe-0.8b", choices=SHAPES)
    parser.add_argument("--quant-types", nargs="+", default=["none", "weight_only_int8", "weight_only_int4"],
                        choices=QUANT_TYPES)  # fmt: skip
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument("--work-dir", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    checkpoint, rows = write_shape(args.shape, args.work_dir / f"{args.shape}-shape"), []
    for quant_type in args.quant_types:
        options = ExportOptions(quant_type=quant_type, load_format="dummy")
        graph_dir = export_cached(checkpoint, args.work_dir / "exported", options)
        found = measure(graph_dir, args.batches, args.rounds, args.cpu_threads)
        rows += [{"quant_type": quant_type, **row} for row in found]
    print("\nquant type            batch   experts hit   MB read   tok/s   limit GB/s   share of the limit")
    for row in rows:
        print(f"{row['quant_type']:22}{row['batch']:5}{row['experts_hit']:14.1f}{row['mb']:10.0f}{row['tok_s']:8.1f}"
                  f"{row['gb_s']:13.1f}{row['share']:21.0%}")  # fmt: skip
    print(json.dumps({"hardware": cpu_name(), "shape": args.shape, "rows": rows}))


if __name__ == "__main__":
    main()
