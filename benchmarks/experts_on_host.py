"""Speed of EXPERTS_ON_HOST on one GPU against the limit of the memories:

    python -m benchmarks.experts_on_host mixtral-8x7b --layers 8 --share 0.3333 --decode 1 8

The limit of a decode step is the time to read what it needs from the device, at the bandwidth of a large sum, plus the
time to read the experts on the host that it needs, at the bandwidth of a large copy. Experts are chosen at random, with
equal probabilities or (Zipf) with 1, 1/2, 1/3, .. in an order of each layer. `in place` reads host memory from kernels;
`copied` waits for the ids of the experts and copies those that are missing; `moved` reads in place after experts that
are used often have moved to the device. Answers are compared with those of the same model with all experts on the
device. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import bandwidth, exported, run_to_end
from benchmarks.random_checkpoint import SHAPES
from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.executors.cuda import host_experts, weights
from engine.executors.cuda.executor import CudaExecutor
from engine.graph.experts import expert_sizes
from engine.ops.cuda.offloaded_experts import OffloadedMatrix
from engine.settings.config import Config

CONTEXT, NUM_BLOCKS, WARM_UP, STEPS, MOVING = 128, 256, 4, 16, 48
PROMPT, CHECKED, NEVER = 4096, (5, 70, 200), 1 << 40  # tokens of prompts


COPIED: dict[int, torch.cuda.Event] = {}  # recorded by `copied` for gate and up, and for down


class Routing:
    """Random choice of experts in place of the router's, and the steps in which each expert is used."""

    def __init__(self, executor: CudaExecutor, num_layers: int, num_experts: int):
        self.logits = torch.zeros(num_layers, num_experts, device="cuda")
        self.num_hits = torch.zeros(num_layers, num_experts, device="cuda")
        self.num_steps = torch.zeros(1, device="cuda")
        calls, layers = executor.runner.program._calls, iter(range(num_layers))
        executor.runner.program._calls = [
            call._replace(run=partial(self._route, next(layers), call.run)) if is_router(call.run) else call
            for call in calls
        ]

    def choose_like(self, name: str) -> None:
        rng, (num_layers, num_experts) = np.random.default_rng(0), self.logits.shape
        ranks = np.stack([rng.permutation(num_experts) + 1.0 for _ in range(num_layers)])
        self.logits.copy_(torch.from_numpy(-np.log(ranks) * (name == "zipf")))

    def _route(self, layer: int, run: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        ids, factors = partial(run, counts=None)(*given)
        noise = -torch.log(-torch.log(torch.rand(len(ids), self.logits.shape[1], device="cuda")))
        ids.copy_((self.logits[layer] + noise).topk(ids.shape[1]).indices)
        self.num_hits[layer] += torch.zeros_like(self.logits[layer]).index_fill_(0, ids.view(-1).long(), 1.0)
        run.keywords["counts"].index_add_(0, ids.view(-1).long(), torch.ones_like(ids.view(-1), dtype=torch.int64))
        self.num_steps += layer == 0
        return ids, factors


def copied(matrix: OffloadedMatrix, topk_ids: Tensor) -> Tensor:
    """Copy the experts on the host that a step needs, as another `OffloadedMatrix.table_for`."""
    stage, main = matrix._stage, torch.cuda.current_stream()
    stage._held = [None, None]
    if matrix._index % 2 == 0:
        needed = set(topk_ids.unique().tolist())
        stage._stream.wait_stream(main)
        for number in (matrix._index, matrix._index + 1):
            each = stage._matrices[number]
            with torch.cuda.stream(stage._stream):
                for place, (expert, part) in enumerate(
                    zip(each.experts[len(each.on_device) :], each.on_host, strict=True)
                ):
                    if expert in needed:
                        start = place * part.nbytes
                        rows = stage._buffers[number % 2][start : start + part.nbytes]
                        rows.copy_(part.view(torch.uint8).view(-1), non_blocking=True)
                COPIED[number % 2] = stage._stream.record_event()
    main.wait_event(COPIED[matrix._index % 2])
    return matrix._tables[1]


class Bench:
    """A model with a share of its experts on the host, whose experts are chosen at random."""

    def __init__(self, executor: CudaExecutor, config: Config):
        graph = executor.runner.program.graph
        self.executor, self.config, self.sizes = executor, config, expert_sizes(graph)
        self.routing = Routing(executor, self.sizes.num_layers, self.sizes.num_experts)
        assert executor.runner.host_experts
        self.matrices = executor.runner.host_experts.matrices
        assert len(self.matrices) == 2 * self.sizes.num_layers, "each layer has experts on the host"
        table = next(value for name, value in graph.parameters.items() if "embed_tokens" in name)
        self.other_bytes = weights.num_bytes(graph) - self.sizes.num_bytes - 2 * table.shape[0] * table.shape[1]
        self.bandwidths = bandwidth(), host_bandwidth()
        executor.allocate(NUM_BLOCKS)  # captures the steps anew

    def decode(self, count: int, num_steps: int = STEPS) -> dict[str, float]:
        loop = EngineLoop(self.executor, NUM_BLOCKS, self.config)
        for request in requests([CONTEXT] * count, num_steps + 3 * WARM_UP + count):
            loop.add(request)
        seen: set[Request] = set()
        while len(seen) < count:
            seen.update(update.request for update in loop.step())
        for _ in range(WARM_UP):
            loop.step()
        torch.cuda.synchronize()
        self.routing.num_hits.zero_()
        self.routing.num_steps.zero_()
        started = time.perf_counter()
        for _ in range(num_steps):
            loop.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        hits, steps = self.routing.num_hits.cpu().numpy(), float(self.routing.num_steps)
        for number in range(count):
            loop.drop(str(number))
        run_to_end(loop)
        on_host = np.zeros_like(hits, bool)
        for layer, matrix in enumerate(self.matrices[::2]):
            on_host[layer, matrix.experts[len(matrix.on_device) :]] = True
        expert_bytes = self.sizes.num_bytes / hits.size
        missed, found = (expert_bytes * hits[where].sum() / steps for where in (on_host, ~on_host))
        cached = count * (CONTEXT + num_steps) * self.executor.block_bytes / self.executor.block_size
        device, host = self.bandwidths
        limit = (self.other_bytes + found + cached) / device + missed / host
        row = {
            "step_ms": 1e3 * seconds / steps,
            "limit_ms": 1e3 * limit,
            "of_limit": limit * steps / seconds,
            "missed_gb": missed / 1e9,
            "device_gb": (self.other_bytes + found + cached) / 1e9,
        }
        return {name: float(value) for name, value in row.items()}

    def copied(self, count: int) -> dict[str, float]:
        """Measure steps that copy what they miss, which need the host between two layers."""
        usual, graphs = OffloadedMatrix.table_for, self.executor.runner.graphs
        captured, graphs._decodes = graphs._decodes, []
        setattr(OffloadedMatrix, "table_for", copied)  # noqa: B010 - mypy refuses to assign to a method
        try:
            return self.decode(count)
        finally:
            graphs._decodes = captured
            setattr(OffloadedMatrix, "table_for", usual)  # noqa: B010

    def moved(self, count: int) -> dict[str, float]:
        """Measure after experts have changed places."""
        host_experts.INTERVAL, host_experts.SWAPPED_BYTES = 16, 1 << 34
        self.decode(1, MOVING)
        host_experts.INTERVAL = NEVER
        return self.decode(count)

    def prefill(self) -> dict[str, float]:
        for _ in range(2):  # the first one compiles kernels
            loop, started = EngineLoop(self.executor, NUM_BLOCKS, self.config), time.perf_counter()
            loop.add(requests([PROMPT], 1)[0])
            run_to_end(loop)
            seconds = time.perf_counter() - started
        copied_s = sum(matrix.host_bytes for matrix in self.matrices) / self.bandwidths[1]
        return {"tok_s": PROMPT / seconds, "step_ms": 1e3 * seconds, "copies_ms": 1e3 * copied_s}


def is_router(run: Any) -> bool:
    return getattr(getattr(run, "func", run), "__name__", "") == "moe_route"


def requests(lengths: list[int] | tuple[int, ...], count: int) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(100, 10000, length).tolist() for length in lengths]
    sampling = Sampling(count, temperature=0)
    return [Request(str(n), prompt, len(prompt), sampling) for n, prompt in enumerate(prompts)]


def answers(executor: CudaExecutor, config: Config) -> list[list[int]]:
    executor.allocate(NUM_BLOCKS)
    loop, asked = EngineLoop(executor, NUM_BLOCKS, config), requests(CHECKED, 16)
    for request in asked:
        loop.add(request)
    run_to_end(loop)
    return [request.token_ids[request.prompt_len :] for request in asked]


def host_bandwidth() -> float:
    """Return the bandwidth of a copy of 1 GiB from pinned memory, in bytes per second."""
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target, times = source.to("cuda"), []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return source.nbytes / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--share", type=float, default=1 / 3, help="share of the experts that is in host memory")
    parser.add_argument("--decode", nargs="*", type=int, default=[1, 8], help="numbers of requests")
    args = parser.parse_args()
    name = f"{args.model}-{args.layers}-layers"
    SHAPES[name] = SHAPES[args.model] | {"num_hidden_layers": args.layers}
    rows = measure(exported(name), args)
    for case, row in rows.items():
        print(f"{case:28}" + "".join(f"{key} {value:9.3f}   " for key, value in row.items()))
    print(json.dumps(rows), flush=True)


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    sizes = ",".join(map(str, {*args.decode, len(CHECKED)}))
    config = Config(device="gpu", batch_size=max(*args.decode, 8), cudagraph_capture_sizes=sizes)
    usual = CudaExecutor(folder, config, "cuda")
    num_bytes = expert_sizes(usual.runner.program.graph).num_bytes
    expected = answers(usual, config)
    usual.close()
    del usual
    gc.collect()
    torch.cuda.empty_cache()
    config = replace(config, experts_on_host=args.share * num_bytes / 2**30)
    started = time.perf_counter()
    executor = CudaExecutor(folder, config, "cuda")
    seconds, used = time.perf_counter() - started, torch.cuda.memory_allocated() / 2**30
    print(f"loaded in {seconds:.1f} s, {used:.1f} GiB on the device")
    assert answers(executor, config) == expected, "an answer differs from that without EXPERTS_ON_HOST"
    print("answers are those without EXPERTS_ON_HOST")
    host_experts.INTERVAL = NEVER
    bench = Bench(executor, config)
    device, host = bench.bandwidths
    print(f"device {device / 1e9:.0f} GB/s, host {host / 1e9:.1f} GB/s, {torch.cuda.get_device_name()}")
    rows: dict[str, Any] = {}
    for kind in ("uniform", "zipf"):
        bench.routing.choose_like(kind)
        for count in args.decode:
            rows[f"{kind} {count}, in place"] = bench.decode(count)
            rows[f"{kind} {count}, copied"] = bench.copied(count)
    for count in args.decode:
        rows[f"zipf {count}, moved"] = bench.moved(count)
    rows[f"prefill of {PROMPT}"] = bench.prefill()
    executor.close()
    return rows


if __name__ == "__main__":
    main()
