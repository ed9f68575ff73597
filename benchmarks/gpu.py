"""Throughput of the engine on one GPU, or with --mp-num on several: `make bench-gpu`, or

    python -m benchmarks.gpu llama-3-8b --quant weight_only_int4 --decode 1 8 64 256 --prefill 1x8192 64x128

The model is an exported one, or a shape, which is first exported without weights (LOAD_FORMAT=dummy). Decode is
measured in the steady state: the given number of requests, each with a context of --context tokens, all in every step.
The limit is the time to read weights, cache and states once at the bandwidth at which this GPU sums numbers; of a
mixture of experts, the weights of the experts that a step uses, whose number in a layer is shown, beside the share of
the busiest expert of a layer in all choices; --router-skew makes some experts busier than others. Busy is the share of
the time in which a kernel runs, by torch's profiler; --kernels shows those that add most time. With several ranks
both are those of the first rank, which reads its own shard. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.experts_hit import busiest_share, experts_of, num_hit, skew
from benchmarks.random_adapter import make_adapter
from benchmarks.random_checkpoint import SHAPES
from engine import graph as graphs
from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.executors import make_executor
from engine.executors.cuda.weights import num_bytes
from engine.executors.distributed.ranks import RanksExecutor
from engine.executors.memory import allocate_cache
from engine.exporting.export import QUANT_TYPES, ExportOptions, export
from engine.exporting.manifest import Manifest, rank_dir
from engine.garbage import collect_garbage_seldom
from engine.models.adapters import CONFIG, WEIGHTS, Adapter, identified
from engine.settings.config import Config

WARM_UP, STEPS, TRACED = 6, 48, 16
MAX_SEQ_LEN = 16384
DUMMY = ExportOptions(max_seq_len=MAX_SEQ_LEN, load_format="dummy")
LORA_RANK = 16


class Bench:
    def __init__(self, model_dir: Path, config: Config, router_skew: float = 0.0):
        self.model = Manifest.read(model_dir)
        files, directory = self.model.graph(), rank_dir(model_dir)
        graph = graphs.read_graph(directory / files.program, files.outputs)
        is_tied = not any("lm_head" in name for name in graph.parameters)
        table = next(value for name, value in graph.parameters.items() if "embed_tokens" in name)
        unread = 0 if is_tied else 2 * table.shape[0] * table.shape[1]
        self.weight_bytes = num_bytes(graph) - unread
        sizes = [node.attributes for node in graph.nodes if node.op == "gated_delta_rule"]
        self.state_bytes = sum(4 * int(each["num_v_heads"]) * int(each["head_dim"]) ** 2 for each in sizes)
        self.num_experts, names = experts_of(graph)
        self.expert_bytes = num_bytes(replace(graph, parameters={name: graph.parameters[name] for name in names}))
        self.executor, self.config = make_executor(model_dir, config), config
        collect_garbage_seldom()
        if router_skew:
            assert config.mp_num == 1, "--router-skew does not reach the processes of other ranks"
            skew(self.executor, router_skew)
        self.num_blocks = allocate_cache(self.executor, config, self.model.max_seq_len)
        self.token_bytes = self.executor.block_bytes / self.executor.block_size
        self.bandwidth = bandwidth()
        self.num_waiting = 0  # requests that wait in addition to those that decode
        self.adapters: list[Adapter] = [()]  # assigned to the requests in turn

    def begin(self, num_requests: int, prompt_len: int, answer_len: int, **sampling: Any) -> EngineLoop:
        rng = np.random.default_rng(0)
        loop = EngineLoop(self.executor, self.num_blocks, self.config)
        fields = {"max_new_tokens": answer_len, "temperature": 0, **sampling}
        for number in range(num_requests):
            ids = rng.integers(100, self.model.vocab_size - 1000, prompt_len).tolist()
            adapter = self.adapters[number % len(self.adapters)]
            if adapter:
                loop.adapters.ensure_loaded(adapter)
            loop.add(Request(str(number), ids, prompt_len, Sampling(**fields, adapter=adapter)))
        return loop

    def prefill(self, num_requests: int, prompt_len: int, kernels: int) -> float:
        """Return the prompt tokens per second until each request has its first token."""
        rates = []
        for _ in range(4):
            loop = self.begin(num_requests, prompt_len, 1)
            torch.cuda.synchronize()
            started = time.perf_counter()
            run_to_end(loop)
            rates.append(num_requests * prompt_len / (time.perf_counter() - started))
        if kernels:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                run_to_end(self.begin(num_requests, prompt_len, 1))
                torch.cuda.synchronize()
            busy_share(profile, 1, kernels)
        return statistics.median(rates[1:])

    def decode(self, num_requests: int, context: int, kernels: int, **sampling: Any) -> dict[str, float]:
        steps = WARM_UP + STEPS + TRACED + 8
        most = -(-num_requests * (context + steps) // self.config.max_step_tokens) + steps
        loop = self.begin(num_requests, context, most + steps, **sampling)
        seen: set[Request] = set()
        while len(seen) < num_requests:
            seen.update(update.request for update in loop.step())
        for number in range(self.num_waiting):
            loop.add(Request(f"waiting {number}", [7] * 64, 64, Sampling(1)))
        for _ in range(WARM_UP):
            loop.step()
        started = time.perf_counter()
        num_tokens = sum(len(update.token_ids) for _ in range(STEPS) for update in loop.step())
        seconds = time.perf_counter() - started
        length = statistics.mean(len(request.token_ids) for request in seen) - STEPS / 2
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(TRACED):
                loop.step()
            torch.cuda.synchronize()
        first = self.executor.first if isinstance(self.executor, RanksExecutor) else self.executor
        hit = num_hit(first, loop.step, self.num_experts) if self.num_experts else 0.0
        busiest = busiest_share(first) if self.num_experts else 0.0
        for name in [*map(str, range(num_requests)), *(f"waiting {number}" for number in range(self.num_waiting))]:
            loop.drop(name)
        run_to_end(loop)
        not_hit = self.expert_bytes * (1 - hit / self.num_experts) if self.num_experts else 0
        read = self.weight_bytes - not_hit + num_requests * (length * self.token_bytes + self.state_bytes)
        return {
            "tok_s": num_tokens / seconds,
            "step_ms": 1e3 * seconds / STEPS,
            "limit_ms": 1e3 * read / self.bandwidth,
            "busy": busy_share(profile, TRACED, kernels),
            "experts_hit": hit,
            "busiest_expert": busiest,
        }


def exported(model: str, options: ExportOptions = DUMMY) -> Path:
    """Return the folder of the exported model. A shape is exported once and kept in build/bench."""
    if model not in SHAPES:
        return Path(model)
    folder, ends = Path("build/bench") / f"{model}-shape", [options.quant_type] * (options.quant_type != "none")
    ends += ["c8"] * options.int8_cache + [f"of-{options.num_ranks}"] * (options.num_ranks > 1)
    ends += ["ep"] * options.expert_parallel + [f"{options.max_seq_len}-long"] * (options.max_seq_len != MAX_SEQ_LEN)
    out = folder.with_name("-".join([model, "dummy", *ends]))
    if not out.exists():
        folder.mkdir(parents=True, exist_ok=True)
        longest = max(SHAPES[model]["max_position_embeddings"], options.max_seq_len or 0)
        (folder / "config.json").write_text(json.dumps(SHAPES[model] | {"max_position_embeddings": longest}))
        export(folder, out, options, report=print)
    return out


def with_adapters(bench: Bench, model_dir: Path, args: argparse.Namespace) -> dict[str, Any]:
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        made = random_adapters(Path(folder), model_dir, max(args.adapters))
        for num_adapters in args.adapters:
            bench.adapters = made[:num_adapters]
            for count in args.decode:
                print(f"decode {count}, {num_adapters} adapters", flush=True)
                rows[f"decode {count}, {num_adapters} LoRA"] = bench.decode(count, args.context, args.kernels)
    return rows


def random_adapters(folder: Path, model_dir: Path, count: int) -> list[Adapter]:
    """Make `count` adapters that share one file of numbers, each with a different scale."""
    first = make_adapter(folder / "0", model_dir, LORA_RANK, 0)
    adapters = [first]
    for number in range(1, count):
        directory = folder / str(number)
        directory.mkdir()
        (directory / WEIGHTS).symlink_to(Path(first[1]) / WEIGHTS)
        keys = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": LORA_RANK + number}
        (directory / CONFIG).write_text(json.dumps(keys))
        adapters.append(identified(directory))
    return adapters


def run_to_end(loop: EngineLoop) -> None:
    while not loop.is_idle:
        loop.step()


def bandwidth() -> float:
    """Return the bandwidth of a sum over 4 GiB, in bytes per second."""
    numbers = torch.zeros(1 << 31, dtype=torch.bfloat16, device="cuda")
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        numbers.sum()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return numbers.nbytes / min(times)


def busy_share(profile: torch.profiler.profile, num_steps: int, num_shown: int) -> float:
    """Return the share of the time from the first kernel to the last in which a kernel runs. Print the kernels that
    add most to this time: from the end of the kernel before, since most begin early and wait for its results."""
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    added: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    busy, reached, previous = 0.0, min(start for start, _, _ in spans), "the begin"
    first, last = reached, max(end for _, end, _ in spans)
    for start, end, name in sorted(spans):
        place = f"{name[:90]} after {previous[:40]}"
        added[place] += max(0.0, end - reached)
        calls[place] += 1
        busy += max(0.0, end - max(start, reached))
        reached, previous = max(reached, end), name
    for place, microseconds in added.most_common(num_shown):
        print(f"    {microseconds / num_steps:9.1f} us a step, {calls[place] / num_steps:6.1f} calls  {place}")
    return busy / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"an exported model's folder, or one of {', '.join(SHAPES)}")
    parser.add_argument("--decode", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--prefill", nargs="*", default=["1x8192", "64x128"])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--max-seq-len", type=int, default=MAX_SEQ_LEN, help="MAX_SEQ_LEN of the shape")
    parser.add_argument("--waiting", type=int, default=0, help="number of requests that wait in the largest case")
    parser.add_argument("--quant", choices=QUANT_TYPES, default="none", help="QUANT_TYPE of the weights of a shape")
    parser.add_argument("--int8-cache", action="store_true", help="export a shape with an int8 KV cache")
    parser.add_argument("--sampled", action="store_true", help="measure with temperature and top_p as well")
    parser.add_argument("--invariant", action="store_true", help="set BATCH_INVARIANT=1")
    parser.add_argument("--adapters", nargs="*", type=int, default=[], help="also measure with adapters of rank 16")
    parser.add_argument("--kernels", type=int, default=0, help="number of kernels to show for each case")
    parser.add_argument("--mp-num", type=int, default=1, help="number of ranks, each on a GPU of its own")
    parser.add_argument("--expert-parallel", action="store_true", help="set ENABLE_EXPERT_PARALLEL=1")
    parser.add_argument("--router-skew", type=float, default=0.0, help="exponent of the Zipf distribution of experts")
    args = parser.parse_args()
    settings: dict[str, Any] = {"batch_size": max([*args.decode, 64]), "max_num_batched_tokens": 8192}
    settings |= {
        "mp_num": args.mp_num,
        "enable_prefix_caching": False,
        "device": "gpu",
        "batch_invariant": args.invariant,
        "block_ratio": 2.0,
        "max_cached_task_num": 10000,
    }
    if args.adapters:
        settings |= {"lora_dir": "/", "max_loras": max(args.adapters), "max_lora_rank": LORA_RANK}
    logging.basicConfig(level="INFO", format="%(relativeCreated)d ms %(message)s")
    started = time.perf_counter()
    options = replace(DUMMY, max_seq_len=args.max_seq_len, quant_type=args.quant, int8_cache=args.int8_cache)
    options = replace(options, num_ranks=args.mp_num, expert_parallel=args.expert_parallel)
    folder = exported(args.model, options)
    bench = Bench(folder, Config(**settings), args.router_skew)
    ready = time.perf_counter() - started
    rows: dict[str, Any] = {"ready_s": ready, "bandwidth": bench.bandwidth}
    samplings: dict[str, dict[str, Any]] = {"": {}}
    if args.sampled:
        samplings["sampled"] = {"temperature": 0.8, "top_p": 0.9}
    for name, sampling in samplings.items():
        for count in args.decode:
            bench.num_waiting = args.waiting if count == settings["batch_size"] else 0
            print(f"decode {count} {name}", flush=True)
            rows[f"decode {count} {name}".strip()] = bench.decode(count, args.context, args.kernels, **sampling)
    for case in args.prefill:
        print(f"prefill {case}", flush=True)
        count, length = map(int, case.split("x"))
        rows[f"prefill {case}"] = {"tok_s": bench.prefill(count, length, args.kernels)}
    if args.adapters:
        rows |= with_adapters(bench, folder, args)
    print(
        f"\n{args.mp_num} x {torch.cuda.get_device_name()}, {bench.bandwidth / 1e12:.2f} TB/s, ready in {ready:.1f} s"
    )
    print("case                     tok/s    step ms   limit ms   of the limit   busy   experts hit   busiest")
    for name, row in rows.items():
        if isinstance(row, dict) and "step_ms" in row:
            share = row["limit_ms"] / row["step_ms"]
            print(
                f"{name:18}{row['tok_s']:12.0f}{row['step_ms']:11.2f}{row['limit_ms']:11.2f}{share:15.0%}{row['busy']:7.1%}"
                f"{row['experts_hit']:14.1f}{row['busiest_expert']:10.1%}"
            )
        elif isinstance(row, dict):
            print(f"{name:18}{row['tok_s']:12.0f}")
    print(json.dumps(rows), flush=True)
    bench.executor.close()


if __name__ == "__main__":
    main()
