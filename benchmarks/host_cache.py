"""Benefit of SWAP_SPACE on one GPU: conversations whose prefixes do not fit into the KV cache.

    python -m benchmarks.host_cache llama-3-8b --swap-space 0 24

Each conversation begins with --context tokens and adds --said tokens per turn. The benchmark measures the time to first
token when conversations take turns one after another, so that each finds its prefix evicted by the others, and when all
continue at once. It then measures the rate of prompts that never recur, which shows the cost of swapping blocks out.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from itertools import count

import numpy as np

from benchmarks.gpu import exported, run_to_end
from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.executors import make_executor
from engine.executors.memory import allocate_cache
from engine.exporting.manifest import Manifest
from engine.garbage import collect_garbage_seldom
from engine.settings.config import Config

ANSWER_LEN, VOCABULARY = 4, 100_000


class Conversations:
    def __init__(self, loop: EngineLoop, args: argparse.Namespace):
        self._loop, self._args = loop, args
        self._rng, self._names = np.random.default_rng(0), count()
        self._said: list[list[int]] = [[] for _ in range(args.conversations)]

    def turns(self, num_tokens: int) -> list[float]:
        """Extend each conversation by `num_tokens` tokens, one after another. Return the seconds to the first token of
        each answer."""
        return [self._answer([said], num_tokens)[0] for said in self._said]

    def turn_of_all(self, num_tokens: int) -> list[float]:
        return self._answer(self._said, num_tokens)

    def rate_of_strangers(self) -> float:
        """Return the prompt tokens per second of new prompts that share no prefix, one for each conversation."""
        prompts: list[list[int]] = [[] for _ in self._said]
        return len(prompts) * self._args.context / max(self._answer(prompts, self._args.context))

    def _answer(self, conversations: Sequence[list[int]], num_tokens: int) -> list[float]:
        for said in conversations:
            said += self._rng.integers(100, VOCABULARY, num_tokens).tolist()
        sampling = Sampling(ANSWER_LEN, temperature=0)
        requests = [Request(str(next(self._names)), list(said), len(said), sampling) for said in conversations]
        seconds: dict[str, float] = {}
        started = time.perf_counter()
        for request in requests:
            self._loop.add(request)
        while len(seconds) < len(requests):
            for update in self._loop.step():
                seconds.setdefault(update.request.request_id, time.perf_counter() - started)
        run_to_end(self._loop)
        for said, request in zip(conversations, requests, strict=True):
            said[:] = request.token_ids
        return list(seconds.values())


def measure(loop: EngineLoop, args: argparse.Namespace) -> dict[str, float]:
    """Return the times to first token in milliseconds, the rate of unrelated prompts and the share of cached prompt
    tokens."""
    conversations = Conversations(loop, args)
    first = conversations.turns(args.context)
    alone = conversations.turns(args.said)
    together = conversations.turn_of_all(args.said)
    return {
        "first turn": 1e3 * statistics.median(first),
        "one by one": 1e3 * statistics.median(alone),
        "one by one, slowest": 1e3 * max(alone),
        "all at once": 1e3 * statistics.median(together),
        "all at once, slowest": 1e3 * max(together),
        "strangers, tok/s": conversations.rate_of_strangers(),
        "found": loop.stats()["num_cached_tokens"] / loop.stats()["num_prompt_tokens"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of an exported model, or a shape")
    parser.add_argument("--swap-space", nargs="*", type=float, default=[0, 24], help="SWAP_SPACE in GiB, in turn")
    parser.add_argument("--blocks", type=int, default=1024, help="number of blocks of the KV cache")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--said", type=int, default=64)
    args = parser.parse_args()
    model_dir, rows = exported(args.model), {}
    collect_garbage_seldom()
    for swap_space in args.swap_space:
        settings = {"device": "gpu", "batch_size": args.conversations, "num_gpu_blocks_override": args.blocks}
        config, started = Config(**settings, swap_space=swap_space), time.perf_counter()
        executor = make_executor(model_dir, config)
        num_blocks = allocate_cache(executor, config, Manifest.read(model_dir).max_seq_len)
        ready = {"ready, s": time.perf_counter() - started}
        rows[f"{swap_space:g}"] = ready | measure(EngineLoop(executor, num_blocks, config), args)
        executor.close()
        print(f"SWAP_SPACE={swap_space:g}")
        for name, value in rows[f"{swap_space:g}"].items():
            print(f"  {name:24}{value:12.2f}", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
