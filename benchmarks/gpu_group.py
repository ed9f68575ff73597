"""Cost of all-reduce over several GPUs: `python -m benchmarks.gpu_group --ranks 2 --width 4096`.

One process for each GPU. The benchmark times all-reduce of [rows, width] in bf16 by each method of
`engine.ops.cuda.group`, whether or not the group would select it for this number of rows, all-reduce with the norm that
follows it, and the gathering of float32 logits. Times are microseconds inside a CUDA graph, the median of the first
rank. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from engine.ops.cpu.group import Membership
from engine.ops.cuda import group, one_shot_all_reduce
from engine.ops.cuda.norms import add_rms_norm

CALLS, ROUNDS = 20, 15  # calls in a graph; replays, of which the median is taken


def microseconds(run: Callable[[], object]) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            run()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / CALLS)
    return statistics.median(times)


def ways(x: Tensor) -> dict[str, Callable[[], object]]:
    """Return the methods of all-reduce that can be used for x, by name."""
    joined, residual, weight = group._joined, x.clone(), torch.ones(x.shape[1], device=x.device)
    assert joined
    found: dict[str, Callable[[], object]] = {"nccl": lambda: dist.all_reduce(x)}
    if joined.shared is not None and x.nbytes <= len(joined.shared):
        shared, name = joined.shared[: x.nbytes].view(x.dtype).view(x.shape), joined.name
        found["one-shot"] = lambda: torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x, "sum", name)

        def two_shot() -> None:
            shared.copy_(x)
            torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", name, x)

        found["two-shot"] = two_shot
    if (buffers := joined.buffers) and buffers.fits(len(x), one_shot_all_reduce.words_of(x)):
        found["own one-shot"] = lambda: one_shot_all_reduce.all_reduce(buffers, x, None, None, 0)
        found["own one-shot + norm"] = lambda: one_shot_all_reduce.all_reduce(buffers, x, residual, weight, 1e-5)
    found["norm alone"] = lambda: add_rms_norm(x, residual, weight, epsilon=1e-5)
    return found


def measure(width: int, vocab_size: int, device: torch.device) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    for num_rows in (1, 8, 32, 64, 128, 256, 512, 2048, 8192):
        x = torch.zeros(num_rows, width, dtype=torch.bfloat16, device=device)
        rows += [{"rows": num_rows, "what": name, "us": microseconds(run)} for name, run in ways(x).items()]
    for num_rows in (1, 8, 64, 256):
        share = torch.zeros(num_rows, vocab_size // dist.get_world_size(), device=device)

        def gather(share: Tensor = share) -> Tensor:
            return group.all_gather(share, num_ranks=dist.get_world_size(), width=vocab_size)

        rows.append({"rows": num_rows, "what": "logits", "us": microseconds(gather)})
    return rows


def show(rows: list[dict[str, float | str]]) -> None:
    names = list(dict.fromkeys(row["what"] for row in rows))
    print("  rows" + "".join(f"{name:>16}" for name in names))
    for num_rows in dict.fromkeys(row["rows"] for row in rows):
        found = {row["what"]: row["us"] for row in rows if row["rows"] == num_rows}
        print(f"{num_rows:6}" + "".join(f"{found[name]:16.1f}" if name in found else " " * 16 for name in names))
    print(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rank-and-file", type=int, nargs=2, help=argparse.SUPPRESS)  # of child processes
    args = parser.parse_args()
    rank, shared_memory_fd = args.rank_and_file or (0, os.memfd_create("rendezvous"))
    others = []
    for other in range(1, 0 if args.rank_and_file else args.ranks):
        command = [sys.executable, "-m", "benchmarks.gpu_group", *sys.argv[1:]]
        place = ["--rank-and-file", str(other), str(shared_memory_fd)]
        others.append(subprocess.Popen(command + place, pass_fds=(shared_memory_fd,)))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group.join(Membership(rank, args.ranks, shared_memory_fd), device)
    rows = measure(args.width, args.vocab, device)
    if rank == 0:
        show(rows)
    group.leave()
    for process in others:
        process.wait()


if __name__ == "__main__":
    main()
