"""Overhead of a step besides its graph: scheduling, graph inputs, sampling rows and accepted tokens.

    python -m benchmarks.overhead

The executor does everything but run the graph and sample. 256 requests decode; figures are the median of the steps in
microseconds per row. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

from engine.core.cache_groups import FULL_ATTENTION
from engine.core.loop import EngineLoop
from engine.core.types import Batch, Request, Sampling, StepOutput
from engine.executors.slots import Choices, Slots
from engine.garbage import collect_garbage_seldom
from engine.ops.sampling_rows import SampledRows
from engine.settings.config import Config

NUM_ROWS, NUM_STEPS, BLOCK_SIZE = 256, 200, 64
PLAIN: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
CASES = {
    "sampled": (PLAIN, 128, 0),
    "repetition penalty, prompts of 1024": (PLAIN | {"repetition_penalty": 1.1}, 1024, 0),
    "10,000 waiting": (PLAIN, 128, 10_000),
}


class NoGraph:
    """Executor without a graph and a sampler. Every token that it returns is 7."""

    block_size, block_bytes, runs_ahead, max_prompt_logits, takes_spans = BLOCK_SIZE, 1, False, 0, False
    max_drafts = 0
    thread = vision = expert_usage = draft_counts = None
    cache_groups = FULL_ATTENTION

    def __init__(self) -> None:
        self._slots = Slots(NUM_ROWS, 64, BLOCK_SIZE, 1 << 17)
        self._output = StepOutput([], [])

    def launch(self, batch: Batch) -> NoGraph:
        self._slots.place(batch)
        self._slots.graph_inputs(batch)
        choices = Choices.of(batch)
        rows = self._slots.sampling_rows(choices)
        sampled = SampledRows.empty(len(choices.slots), 0)
        sampled.token_ids[:] = 7
        self._output = self._slots.accept(batch, choices, rows, sampled)
        return self

    def result(self) -> StepOutput:
        return self._output


def measure(sampling: dict[str, Any], prompt_len: int, num_waiting: int) -> float:
    """Return the microseconds per row of a decode step."""
    unlimited = Config(max_num_batched_tokens=1 << 20, max_cached_task_num=1 << 20, max_waiting_tokens=1 << 30)
    config = replace(unlimited, batch_size=NUM_ROWS)
    loop = EngineLoop(NoGraph(), NUM_ROWS * 32, config)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    for index in range(NUM_ROWS + num_waiting):
        prompt = rng.integers(0, 1 << 15, prompt_len).tolist()
        loop.add(Request(str(index), prompt, prompt_len, Sampling(NUM_STEPS + 10, **sampling)))
    for _ in range(3):
        loop.step()
    times = []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        updates = loop.step()
        times.append(time.perf_counter() - started)
        assert len(updates) == NUM_ROWS
    return 1e6 * statistics.median(times) / NUM_ROWS


def main() -> None:
    collect_garbage_seldom()  # as the engine does
    rows = {name: measure(*case) for name, case in CASES.items()}
    for name, microseconds in rows.items():
        print(f"{name:40}{microseconds:6.2f} us a row")
    print(json.dumps({"rows": NUM_ROWS, "us_a_row": rows}))


if __name__ == "__main__":
    main()
