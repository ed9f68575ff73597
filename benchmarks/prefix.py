"""Cost of a prompt whose prefix is cached: time to its first token, and to the log-probabilities of its tokens.

    python -m benchmarks.prefix

Random weights in the shape of Qwen2.5-0.5B, one request at a time. Figures are medians of new prompts, and of the same
prompts with a different end. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.bench import prompt_ids
from benchmarks.random_checkpoint import make_checkpoint
from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.executors import make_executor
from engine.executors.memory import allocate_cache
from engine.exporting.cache import export_cached
from engine.exporting.export import ExportOptions
from engine.exporting.manifest import Manifest
from engine.settings.config import Config

WORK, SHAPE, END_LEN, REPEATS = Path("build/bench"), "qwen2.5-0.5b", 4, 3
ASKED = {"first token": Sampling(1, temperature=0), "scores": Sampling(0, num_prompt_logprobs=1)}
CASES = (("first token", 1024), ("first token", 4096), ("scores", 900))


def milliseconds(loop: EngineLoop, token_ids: list[int], sampling: Sampling) -> float:
    loop.add(Request("one", token_ids, len(token_ids), sampling))
    started = time.perf_counter()
    while not loop.is_idle:
        loop.step()
    return 1e3 * (time.perf_counter() - started)


def main() -> None:
    graph_dir = export_cached(make_checkpoint(SHAPE, WORK / SHAPE), WORK / "exported", ExportOptions())
    config, model, rng, rows = Config(), Manifest.read(graph_dir), np.random.default_rng(0), []
    executor = make_executor(graph_dir, config)
    loop = EngineLoop(executor, allocate_cache(executor, config, model.max_seq_len), config)
    for asked, length in CASES:
        times: tuple[list[float], list[float]] = [], []
        for _ in range(REPEATS):
            beginning = prompt_ids(rng, model.vocab_size, length - END_LEN)
            for each in times:
                prompt = beginning + prompt_ids(rng, model.vocab_size, END_LEN)
                each.append(milliseconds(loop, prompt, ASKED[asked]))
        new, known = map(statistics.median, times)
        print(f"{asked} of {length} tokens: {new:.0f} ms, with a known beginning {known:.0f} ms, 1/{new / known:.1f}")
        rows.append({"asked": asked, "tokens": length, "new_ms": new, "known_ms": known})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
