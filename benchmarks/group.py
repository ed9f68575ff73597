"""Cost of communication between CPU ranks on this machine: `python -m benchmarks.group`.

All-reduce of usual shapes over 2 and 4 processes with one thread each, and the matrix products of a decode step of
Qwen2.5-0.5B with their all-reduces, computed by ranks with one thread and by one process with two. Figures are medians
over rounds of medians, and their minimum: a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from multiprocessing import reduction

import numpy as np

from benchmarks.kernels import HIDDEN, LAYERS, LINEARS, packed, prepared, random_f32, seconds
from engine.dtypes import to_bf16
from engine.ops import cpu
from engine.ops.cpu import group

SHAPES = [(1, 896), (8, 896), (32, 896), (256, 896), (1, 4096)]
SPLIT_BY_COLUMNS = ("o", "down")  # each rank reads a part of the input; all-reduce follows


def bench_sum(shape: tuple[int, int]) -> float:
    x, y = random_f32(*shape), np.empty(shape, np.float32)
    all_reduce = cpu.c_library().llm_all_reduce

    def run():
        for _ in range(50):
            assert all_reduce(x.ctypes.data, y.ctypes.data, x.size) is None

    return seconds(run, 41) / 50


def bench_step(num_ranks: int, tokens: int) -> float:
    """Return the median time in seconds of all layers' matrix products, with the all-reduces that they need."""
    all_reduce = cpu.c_library().llm_all_reduce
    layer = []
    for name, (num_out, width) in LINEARS.items():
        split = name in SPLIT_BY_COLUMNS
        num_out, width = (num_out, width // num_ranks) if split else (num_out // num_ranks, width)
        bits = packed("linear", to_bf16(random_f32(num_out, width)))
        x, y = random_f32(tokens, width), np.empty((tokens, num_out), np.float32)
        layer.append(([prepared("linear", [x, bits.copy()], y) for _ in range(LAYERS)], y, split))
    total = np.empty((tokens, HIDDEN), np.float32)

    def run():
        for i in range(LAYERS):
            for calls, y, split in layer:
                calls[i]()
                if split:
                    assert all_reduce(y.ctypes.data, total.ctypes.data, y.size) is None

    return seconds(run, 41)


def measure(rank: int, num_ranks: int, threads: int, shared_memory, results) -> None:
    cpu.set_num_threads(threads)
    if num_ranks > 1:
        group.join(group.Membership(rank, num_ranks, shared_memory.detach()))
    rows = [] if num_ranks == 1 else [(f"all_reduce {list(shape)}", bench_sum(shape)) for shape in SHAPES]
    rows += [(f"step T={tokens}", bench_step(num_ranks, tokens)) for tokens in (1, 8, 32)]
    if rank == 0:
        results.put(rows)
    group.leave()


def bench_ranks(num_ranks: int, threads: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    results, shared_memory_fd = context.Queue(), group.create_shared_memory(num_ranks)
    ranks = []
    for rank in range(num_ranks):
        arguments = (rank, num_ranks, threads, reduction.DupFd(shared_memory_fd), results)
        ranks.append(context.Process(target=measure, args=arguments))
        ranks[-1].start()
    rows = results.get()
    for process in ranks:
        process.join()
    os.close(shared_memory_fd)
    return dict(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds, in which the variants take turns")
    options = parser.parse_args()
    cases = [(1, 2), *((num_ranks, 1) for num_ranks in options.ranks)]
    rounds = [{case: bench_ranks(*case) for case in cases} for _ in range(options.rounds)]
    rows = []
    for num_ranks, threads in cases:
        for name in rounds[0][num_ranks, threads]:
            times = [one[num_ranks, threads][name] for one in rounds]
            row = {"ranks": num_ranks, "threads": threads, "name": name, "seconds": statistics.median(times)}
            rows.append(row | {"lowest": min(times)})
            print(
                f"{num_ranks} ranks of {threads} threads   {name:<25} {row['seconds'] * 1e6:>10.1f} us"
                f"   lowest {min(times) * 1e6:>10.1f} us"
            )
    print(json.dumps({"isa": cpu.cpu_isa(), "cores": os.cpu_count(), "rounds": options.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
