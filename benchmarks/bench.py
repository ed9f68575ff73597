"""Throughput and latency of the engine alone, then of the whole server over HTTP: `make bench`, or

    python -m benchmarks.bench --shape qwen2.5-0.5b --cases 1x128x64 8x128x64 32x128x64 --streams 1 8 32

A case is REQUESTS x PROMPT_LEN x ANSWER_LEN in tokens, all requests submitted at once: prefill ends when every request
has its first token, decode is the rest. Over HTTP every stream is one client that streams an answer with the lengths of
the first case; with --arrivals the clients arrive one by one at this average rate per second (a Poisson process). Each
figure is the median of --repeats runs after one warm-up. `--load-format dummy` draws random weights when the graph is
loaded.
The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.random_checkpoint import SHAPES, make_checkpoint, write_shape
from benchmarks.server import running_server
from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.executors import make_executor
from engine.executors.memory import allocate_cache
from engine.exporting.cache import export_cached
from engine.exporting.export import LOAD_FORMATS, QUANT_TYPES, ExportOptions
from engine.exporting.manifest import Manifest
from engine.garbage import collect_garbage_seldom
from engine.settings.config import Config

MAX_TOKENS_IN_STEP = 4096
Case = tuple[int, int, int]  # number of requests, tokens of each prompt, tokens of each answer


def case_of(text: str) -> Case:
    num_requests, prompt_len, answer_len = map(int, text.split("x"))
    return num_requests, prompt_len, answer_len


def prompt_ids(rng: np.random.Generator, vocab_size: int, count: int) -> list[int]:
    return rng.integers(100, vocab_size - 1000, count).tolist()


def measure_offline(graph_dir: Path, cases: list[Case], repeats: int, **settings: Any) -> list[dict[str, float]]:
    most, longest = max(case[0] for case in cases), max(case[1] + case[2] for case in cases)
    limits = {"max_num_batched_tokens": MAX_TOKENS_IN_STEP, "batch_size": most, "enable_prefix_caching": False}
    config, model = Config(**{**limits, **settings}), Manifest.read(graph_dir)
    executor = make_executor(graph_dir, config)
    collect_garbage_seldom()
    num_blocks = allocate_cache(executor, config, model.max_seq_len)
    assert num_blocks * executor.block_size >= most * longest, "too little memory for the cases"
    rows = []
    for case in cases:
        loops = (EngineLoop(executor, num_blocks, config) for _ in range(repeats + 1))
        runs = [run_case(loop, model.vocab_size, case) for loop in loops][1:]
        figures = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        rows.append({"requests": case[0], "prompt_len": case[1], "answer_len": case[2], **figures})
    executor.close()
    return rows


def run_case(loop: EngineLoop, vocab_size: int, case: Case) -> dict[str, float]:
    num_requests, prompt_len, answer_len = case
    rng = np.random.default_rng(0)
    for index in range(num_requests):
        ids = prompt_ids(rng, vocab_size, prompt_len)
        loop.add(Request(str(index), ids, prompt_len, Sampling(max_new_tokens=answer_len, temperature=0)))
    first: dict[Request, float] = {}
    started, num_early = time.perf_counter(), 0
    while not loop.is_idle:
        for update in loop.step():
            first.setdefault(update.request, time.perf_counter())
            num_early += len(first) < num_requests
    ended, prefilled = time.perf_counter(), max(first.values())
    num_late = num_requests * answer_len - num_early - 1  # tokens after the last request's first one
    return {
        "prefill_tok_s": num_requests * prompt_len / (prefilled - started),
        "decode_tok_s": num_late / (ended - prefilled),
        "output_tok_s": num_requests * answer_len / (ended - started),
        "ttft_ms": 1e3 * statistics.median(at - started for at in first.values()),
        "itl_ms": 1e3 * (ended - prefilled) / max(1, answer_len - 1),
    }


async def one_stream(session: aiohttp.ClientSession, url: str, body: dict, delay: float) -> tuple[float, list[float]]:
    """Stream one answer. Return when the request started and when each response arrived, in seconds."""
    await asyncio.sleep(delay)
    started, arrivals, last = time.perf_counter(), [], b""
    async with session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            arrivals.append(time.perf_counter())
            last = line
    assert json.loads(last)["tokens_all_num"] == body["max_dec_len"], last
    return started, arrivals


async def run_streams(port: int, prompts: list[list[int]], answer_len: int, rate: float) -> dict[str, float]:
    """Run one stream for each prompt, all at once, or with `rate` arrivals per second if it is not 0."""
    gaps = np.random.default_rng(1).exponential(1 / rate if rate else 0, len(prompts))
    url = f"http://127.0.0.1:{port}/v1/completions"
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        # The native API also streams tokens without text, which are frequent in the answers of a random model.
        bodies = [
            {"input_ids": ids, "max_dec_len": answer_len, "ignore_eos": True, "temperature": 0, "stream": True}
            for ids in prompts
        ]
        each = zip(bodies, gaps.cumsum(), strict=True)
        streams = await asyncio.gather(*(one_stream(session, url, body, delay) for body, delay in each))
    started = min(begin for begin, _ in streams)
    ended = max(arrivals[-1] for _, arrivals in streams)
    waits = {
        "ttft": [arrivals[0] - begin for begin, arrivals in streams],
        "itl": [gap for _, arrivals in streams for gap in np.diff(arrivals)] or [0.0],  # one response may have all
    }
    shown = {f"{name}_p{q}_ms": 1e3 * float(np.percentile(waits[name], q)) for name in waits for q in (50, 99)}
    return {"output_tok_s": len(prompts) * answer_len / (ended - started), **shown}


def measure_http(graph_dir: Path, streams: list[int], case: Case, repeats: int, rate: float) -> list[dict]:
    _, prompt_len, answer_len = case
    vocab_size = Manifest.read(graph_dir).vocab_size
    rows = []
    with running_server(settings_for(graph_dir, max(streams))) as server:
        port = server.ports["SERVICE_HTTP_PORT"]
        for count in streams:
            rng = np.random.default_rng(0)
            prompts = [prompt_ids(rng, vocab_size, prompt_len) for _ in range(count)]
            runs = [asyncio.run(run_streams(port, prompts, answer_len, rate)) for _ in range(repeats + 1)][1:]
            rows.append({"streams": count} | {n: statistics.median(run[n] for run in runs) for n in runs[0]})
    return rows


def settings_for(graph_dir: Path, batch_size: int) -> dict[str, str]:
    """Return the settings of a server for maximum throughput with `batch_size` streams."""
    most = {"BATCH_SIZE": str(batch_size), "MAX_CACHED_TASK_NUM": str(batch_size)}
    most |= {"MAX_NUM_BATCHED_TOKENS": str(MAX_TOKENS_IN_STEP), "ENABLE_PREFIX_CACHING": "0"}
    return {"MODEL_DIR": str(graph_dir), **most}


def print_tables(offline: list[dict], http: list[dict]) -> None:
    print("\noffline: requests  prompt  answer   prefill tok/s   decode tok/s   output tok/s   TTFT ms   ITL ms")
    for row in offline:
        print(
            f"{row['requests']:17}{row['prompt_len']:8}{row['answer_len']:8}{row['prefill_tok_s']:16.0f}"
            f"{row['decode_tok_s']:15.1f}{row['output_tok_s']:15.1f}{row['ttft_ms']:10.0f}{row['itl_ms']:9.1f}"
        )
    if http:
        print("\nHTTP: streams   output tok/s   TTFT p50 ms   p99 ms   ITL p50 ms   p99 ms   of the offline rate")
    same = {row["requests"]: row["output_tok_s"] for row in reversed(offline)}
    for row in http:
        share = f"{row['output_tok_s'] / same[row['streams']]:.0%}" if row["streams"] in same else "-"
        print(f"{row['streams']:13}{row['output_tok_s']:15.1f}{row['ttft_p50_ms']:14.0f}{row['ttft_p99_ms']:9.0f}"
              f"{row['itl_p50_ms']:13.1f}{row['itl_p99_ms']:9.1f}{share:>22}")  # fmt: skip


def cpu_name() -> str:
    lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{lines[0].split(':')[1].strip() if lines else platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--cases", nargs="+", default=["1x128x64", "8x128x64", "32x128x64"])
    parser.add_argument("--streams", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--arrivals", type=float, default=0, help="mean streams that begin per second; 0: all at once")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quant-type", default="none", choices=QUANT_TYPES, help="QUANT_TYPE of the weights")
    parser.add_argument("--load-format", default="auto", choices=LOAD_FORMATS, help="dummy: random weights")
    parser.add_argument("--mp-num", type=int, default=1, help="number of tensor-parallel ranks of the offline cases")
    parser.add_argument(
        "--cpu-threads", type=int, default=0, help="of each rank, offline; 0: as many as there are cores"
    )
    parser.add_argument("--work-dir", type=Path, default=Path("build/bench"), help="folder of the checkpoints")
    args = parser.parse_args()
    cases = [case_of(text) for text in args.cases]
    if args.load_format == "dummy":
        checkpoint = write_shape(args.shape, args.work_dir / f"{args.shape}-shape")
    else:
        checkpoint = make_checkpoint(args.shape, args.work_dir / args.shape)
    options = ExportOptions(quant_type=args.quant_type, num_ranks=args.mp_num, load_format=args.load_format)
    graph_dir = export_cached(checkpoint, args.work_dir / "exported", options)
    offline = measure_offline(graph_dir, cases, args.repeats, mp_num=args.mp_num, cpu_threads=args.cpu_threads)
    http = measure_http(graph_dir, args.streams, cases[0], args.repeats, args.arrivals) if args.streams else []
    print_tables(offline, http)
    print(
        json.dumps(
            {
                "hardware": cpu_name(),
                "shape": args.shape,
                "quant_type": args.quant_type,
                "offline": offline,
                "http": http,
            }
        )
    )


if __name__ == "__main__":
    main()
