"""Time between the tokens of answers on one GPU while long prompts arrive, which it computes itself or a prefill
instance on another GPU computes.

    python -m benchmarks.gpu_disaggregation llama-3-8b --gpus 0 1

The engines run without a server: what is measured are their steps and transfers. Each process sees its own GPU only.
Prompts are random, so no prefix is cached. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from engine.core.loop import EngineLoop

IDENTITY: dict[str, str] = {}
ANSWER = (500, 8000)  # tokens of the prompt and of the answer


def make_loop(folder: Path, memory: float) -> EngineLoop:
    from engine.core.loop import EngineLoop
    from engine.executors import make_executor
    from engine.executors.memory import allocate_cache
    from engine.exporting.manifest import Manifest
    from engine.garbage import collect_garbage_seldom
    from engine.settings.config import Config

    config = Config(device="gpu", batch_size=64, gpu_memory_utilization=memory, max_num_batched_tokens=2048)
    executor = make_executor(folder, config)
    collect_garbage_seldom()
    return EngineLoop(executor, allocate_cache(executor, config, Manifest.read(folder).max_seq_len), config)


def serve(folder: Path, memory: float) -> None:
    """Compute prompts for the decode instance until the standard input is closed."""
    import select

    from engine.core.prefill_jobs import PrefillJobs
    from engine.transfer.server import PrefillServer, ServedBlocks

    loop = make_loop(folder, memory)
    jobs, access = PrefillJobs(loop.scheduler), loop.executor.blocks()  # type: ignore[attr-defined]
    loop.serve_prefills(jobs)
    served = ServedBlocks(jobs, access.read_block, IDENTITY, 1 << 20, 1 << 20, access.digests, access.share())
    print(PrefillServer(("127.0.0.1", 0), served, "").port, flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        loop.step()
        if loop.is_idle and not jobs.num_open:
            time.sleep(1e-4)


def connect(loop: EngineLoop, port: int) -> Any:
    from engine.core.remote_prefill import RemotePrefill
    from engine.transfer.client import PrefillClient, PulledBlocks

    access = loop.executor.blocks()  # type: ignore[attr-defined]
    pulled = PulledBlocks(access.write_block, len(access.read_block(0)), IDENTITY, access, needs_device=True)
    client = PrefillClient([("127.0.0.1", port)], pulled, "")
    while not client.is_ready:
        assert not client.refusals(0), client.refusals(0)
        time.sleep(0.01)
    return RemotePrefill(loop.scheduler, client, min_tokens=512)


class Load:
    """Answers that are generated all the time, and prompts of which some are always waiting or being computed."""

    def __init__(self, loop: EngineLoop, num_answers: int, prompt_len: int):
        self.loop, self.num_answers, self.prompt_len = loop, num_answers, prompt_len
        self._rng, self._count = np.random.default_rng(0), 0
        self._at: dict[str, float] = {}  # of the last token of each answer, or of the arrival of a prompt
        self.intervals_s: list[float] = []
        self.first_token_s: list[float] = []

    def add(self, kind: str, num_tokens: int, num_new: int) -> None:
        from engine.core.types import Request, Sampling

        self._count += 1
        name = f"{kind}{self._count}"
        ids = self._rng.integers(100, 20000, num_tokens).tolist()
        self._at[name] = time.perf_counter()
        self.loop.add(Request(name, ids, num_tokens, Sampling(num_new, temperature=0)))

    def run(self, seconds: float, num_prompts: int) -> dict[str, float]:
        """Return percentiles in milliseconds. `num_prompts` prompts are open at any time."""
        for _ in range(self.num_answers):
            self.add("a", *ANSWER)
        self._steps(lambda: len(self.intervals_s) < 20 * self.num_answers)
        self.intervals_s.clear()
        self.first_token_s.clear()
        for _ in range(num_prompts):
            self.add("p", self.prompt_len, 1)
        until = time.perf_counter() + seconds
        self._steps(lambda: time.perf_counter() < until)
        found = percentiles("interval", self.intervals_s) | percentiles("first_token", self.first_token_s)
        for name in list(self._at):
            self.loop.drop(name)
        self._at.clear()
        while not self.loop.is_idle or (self.loop.remote and self.loop.remote.num_open):
            self.loop.step()
        return {**found, "prompts_s": len(self.first_token_s) / seconds, "tokens_s": len(self.intervals_s) / seconds}

    def _steps(self, goes_on: Any) -> None:
        while goes_on():
            updates = self.loop.step()
            now = time.perf_counter()
            for update in updates:
                name = update.request.request_id
                if name not in self._at:
                    continue
                times = self.intervals_s if name.startswith("a") else self.first_token_s
                times.append(now - self._at[name])
                self._at[name] = now
                if update.finish_reason:
                    del self._at[name]
                    self.add(name[0], *(ANSWER if name.startswith("a") else (self.prompt_len, 1)))


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {f"{name}_p{p}_ms": 1e3 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 99)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_disaggregation", description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder of an exported model, or a shape of benchmarks.gpu")
    parser.add_argument("--gpus", nargs=2, default=["0", "1"], help="GPUs of the prefill and of the decode instance")
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=1, help="number of prompts that are open at any time")
    parser.add_argument("--prompt-len", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    memory = 0.4 if args.gpus[0] == args.gpus[1] else 0.85
    if not args.serve:
        os.environ["CUDA_VISIBLE_DEVICES"] = args.gpus[1]  # before torch is imported
    from benchmarks.gpu import exported

    folder = exported(args.model)
    if args.serve:
        serve(folder, memory)
        return 0
    command = [sys.executable, "-m", "benchmarks.gpu_disaggregation", str(folder), "--serve", "--gpus", *args.gpus]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": args.gpus[0]}
    report: dict[str, Any] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as server:
        assert server.stdout and server.stdin
        loop = make_loop(folder, memory)
        remote = connect(loop, int(server.stdout.readline()))
        load = Load(loop, args.answers, args.prompt_len)
        for name, num_prompts, source in (
            ("idle", 0, None),
            ("mixed", args.prompts, None),
            ("disaggregated", args.prompts, remote),
            ("idle again", 0, None),
        ):
            loop.pull_prefills(source)
            report[name] = load.run(args.seconds, num_prompts)
            print(name, {key: round(value, 2) for key, value in report[name].items()}, flush=True)
        counters = remote.counters
        report |= {"remote": counters.num_remote_prefills, "failed": counters.num_remote_prefill_failures}
        server.stdin.close()
    print(json.dumps({"model": args.model, "gpus": args.gpus, "answers": args.answers, **report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
