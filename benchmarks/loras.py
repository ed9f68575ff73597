"""Cost of LoRA adapters: prefill and decode without one, with one for all requests, and with a different one for each
of up to 8.

    python -m benchmarks.loras [--rank 16] [--rounds 5]

Random weights in the shape of Qwen2.5-0.5B, with adapters for all its linear layers. The variants run in turn; figures
are medians of the rounds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.bench import cpu_name, prompt_ids
from benchmarks.random_adapter import make_adapter
from benchmarks.random_checkpoint import make_checkpoint
from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.executors import make_executor
from engine.executors.memory import allocate_cache
from engine.exporting.cache import export_cached
from engine.exporting.export import QUANT_TYPES, ExportOptions
from engine.exporting.manifest import Manifest
from engine.garbage import collect_garbage_seldom
from engine.models.adapters import Adapter
from engine.settings.config import Config

PROMPT_LEN, ANSWER_LEN = 128, 32
MOST = 8


def run_once(loop: EngineLoop, vocab_size: int, adapters: list[tuple[str, ...]]) -> tuple[float, float]:
    """Run one request for each of `adapters`. Return the seconds until all have their first token, and the seconds
    after that."""
    rng, sampling = np.random.default_rng(0), Sampling(ANSWER_LEN, temperature=0)
    for index, adapter in enumerate(adapters):
        ids = prompt_ids(rng, vocab_size, PROMPT_LEN)
        loop.add(Request(str(index), ids, PROMPT_LEN, replace(sampling, adapter=adapter)))
    started, first, at = time.perf_counter(), set(), 0.0
    while not loop.is_idle:
        for update in loop.step():
            first.add(update.request.request_id)
        if len(first) < len(adapters) or not at:
            at = time.perf_counter()
    return at - started, time.perf_counter() - at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--quant-type", default="none", choices=QUANT_TYPES, help="QUANT_TYPE of the weights")
    parser.add_argument("--work-dir", type=Path, default=Path("build/bench"), help="folder of the checkpoint")
    args = parser.parse_args()
    checkpoint = make_checkpoint("qwen2.5-0.5b", args.work_dir / "qwen2.5-0.5b")
    graph_dir = export_cached(checkpoint, args.work_dir / "exported", ExportOptions(quant_type=args.quant_type))
    model, limits = Manifest.read(graph_dir), {"max_num_batched_tokens": 4096, "batch_size": max(args.requests)}
    config = Config(lora_dir="/", max_lora_rank=args.rank, max_loras=MOST, enable_prefix_caching=False, **limits)
    executor = make_executor(graph_dir, config)
    collect_garbage_seldom()
    loop, rows = EngineLoop(executor, allocate_cache(executor, config, model.max_seq_len), config), []
    with tempfile.TemporaryDirectory() as folder:
        adapters = [make_adapter(Path(folder) / str(seed), graph_dir, args.rank, seed) for seed in range(MOST)]
        started = time.perf_counter()
        for adapter in adapters:
            loop.adapters.ensure_loaded(adapter)
        load_ms = 1e3 * (time.perf_counter() - started) / MOST
        for count in args.requests:
            kinds: dict[str, list[Adapter]] = {"none": [()], "one": adapters[:1], "each": adapters[: min(count, MOST)]}
            asked = {kind: [some[at % len(some)] for at in range(count)] for kind, some in kinds.items()}
            runs = []
            for turn in range(args.rounds + 1):  # the variants rotate, so that each comes first once
                order = [*kinds][turn % 3 :] + [*kinds][: turn % 3]
                runs.append({kind: run_once(loop, model.vocab_size, asked[kind]) for kind in order})
            for kind in kinds:
                shares = [[run["none"][at] / run[kind][at] for run in runs[1:]] for at in (0, 1)]
                prefill, decode = map(statistics.median, shares)
                rows.append({"requests": count, "adapters": kind, "prefill": prefill, "decode": decode})
                print(f"{count:4} requests, adapters: {kind:5} prefill at {prefill:.0%}, decode at {decode:.0%}")
    executor.close()
    print(f"into memory: {load_ms:.0f} ms each")
    print(json.dumps({"hardware": cpu_name(), "rank": args.rank, "load_ms": load_ms, "rows": rows}))


if __name__ == "__main__":
    main()
