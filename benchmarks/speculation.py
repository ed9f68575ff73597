"""Gain of SPECULATE_METHOD where answers repeat or edit their prompt, and its cost where nothing repeats.

    python -m benchmarks.speculation [--methods ngram suffix] [--rounds 3]

Random weights in the shape of Qwen2.5-0.5B never repeat anything by themselves: the graph and the sampler run as usual,
then a script determines the sampled tokens. In `repeats` the answer is the prompt again; in `edits` the prompt is a
source file of the engine and the answer is that file with renamed variables and new lines; in `random` pairs of tokens
recur by chance and are followed by other tokens. Runs without drafts and with each method alternate; figures are
medians of the rounds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.bench import cpu_name, prompt_ids
from benchmarks.random_checkpoint import SHAPES, make_checkpoint
from engine.core.executor import Executor, Step
from engine.core.loop import EngineLoop
from engine.core.types import Batch, Request, Sampling, StepOutput
from engine.executors import make_executor
from engine.executors.memory import allocate_cache
from engine.executors.speculation.executor import with_speculation
from engine.executors.speculation.policy import DraftPolicy
from engine.executors.step import Mask
from engine.exporting.cache import export_cached
from engine.exporting.export import ExportOptions
from engine.exporting.manifest import Manifest
from engine.garbage import collect_garbage_seldom
from engine.settings.config import Config

PROMPT_LEN, ANSWER_LEN = 256, 192
SOURCES, MIN_SOURCE_BYTES = Path(__file__).parents[1] / "engine" / "core", 4000


class Scripted:
    """Executor that runs the graph, but returns scripted tokens: those of request r are script[r]."""

    vision = expert_usage = draft_counts = None

    def __init__(self, executor: Executor, script: list[list[int]]):
        self._executor, self._script = executor, script
        self.thread = executor.thread
        self.block_size, self.block_bytes = executor.block_size, executor.block_bytes
        self.runs_ahead, self.max_prompt_logits = False, executor.max_prompt_logits
        self.cache_groups, self.takes_spans = executor.cache_groups, executor.takes_spans
        self.max_drafts = 0
        self._request_of: dict[int, int] = {}
        self._num_new: dict[int, int] = {}
        self._num_arrived = 0
        self._step: Step | None = None
        self._batch = Batch([])

    def launch(self, batch: Batch) -> Scripted:
        self._batch, self._step = batch, self._executor.launch(batch)
        return self

    def result(self) -> StepOutput:
        assert self._step
        self._step.result()
        return self._output()

    def compute(self, batch: Batch, wait_for_mask: Callable[[], Mask]) -> StepOutput:
        self._batch = batch
        self._executor.compute(batch, wait_for_mask)  # type: ignore[attr-defined]
        return self._output()

    def _output(self) -> StepOutput:
        for arrival in self._batch.arrivals:
            self._request_of[arrival.slot], self._num_new[arrival.slot] = self._num_arrived, 0
            self._num_arrived += 1
        token_ids = []
        for row in self._batch.rows:
            if row.num_sampled:
                drafts = list(row.token_ids)[len(row.token_ids) - row.num_sampled + 1 :]
                start = self._num_new[row.slot]
                truth = self._script[self._request_of[row.slot]][start : start + row.num_sampled]
                count = 1
                while count < len(truth) and drafts[count - 1] == truth[count - 1]:
                    count += 1
                token_ids.append(truth[:count])
                self._num_new[row.slot] += count
        return StepOutput(token_ids, [None] * len(token_ids))


def measure(drafting: Executor, num_blocks: int, config: Config, prompts: list[list[int]]) -> tuple[float, float]:
    """Return tokens per second, and the share of the drafted tokens that were accepted."""
    loop = EngineLoop(drafting, num_blocks, config)
    for index, prompt in enumerate(prompts):
        loop.add(Request(str(index), list(prompt), len(prompt), Sampling(ANSWER_LEN, temperature=0)))
    while loop.stats()["num_generated_tokens"] < len(prompts):  # until all prompts are computed
        loop.step()
    started = time.perf_counter()
    while not loop.is_idle:
        loop.step()
    stats = loop.stats()
    rate = len(prompts) * (ANSWER_LEN - 1) / (time.perf_counter() - started)
    return rate, stats["num_accepted_tokens"] / max(1, stats["num_drafted_tokens"])


def scripts(num_requests: int, vocab_size: int) -> dict[str, tuple[list, list]]:
    rng = np.random.default_rng(0)
    prompts = [prompt_ids(rng, vocab_size, PROMPT_LEN) for _ in range(num_requests)]
    text = rng.integers(100, 200, (num_requests, ANSWER_LEN)).tolist()  # n-grams recur with different continuations
    sources = [path.read_text() for path in sorted(SOURCES.glob("*.py")) if path.stat().st_size > MIN_SOURCE_BYTES]
    edits = [code_edit(sources[index % len(sources)]) for index in range(num_requests)]
    return {
        "repeats": (prompts, [p[:ANSWER_LEN] for p in prompts]),
        "edits": tuple(map(list, zip(*edits, strict=True))),  # type: ignore[dict-item]
        "random": (prompts, text),
    }


def code_edit(source: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a source file and of an edited copy, in which every tenth line has another name and every
    fifteenth line is new. Tokens are words, signs and spaces; both are cut to their lengths."""
    ids: dict[str, int] = {}

    def tokens(text: str) -> list[int]:
        return [ids.setdefault(word, 1000 + len(ids)) for word in re.findall(r"\w+|[^\w\s]|\n *| +", text)]

    prompt = tokens(source)[: 4 * PROMPT_LEN]
    lines = source.splitlines(keepends=True)
    for number in range(5, len(lines), 10):
        lines[number] = re.sub(r"([a-z_]{4,})", rf"\1_{number}", lines[number], count=1)
    for number in range(len(lines) // 15 * 15, 0, -15):
        lines.insert(number, f"    assert checked({number}), limit_{number}\n")
    return prompt, tokens("".join(lines))[:ANSWER_LEN]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--methods", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work-dir", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    checkpoint = make_checkpoint(args.shape, args.work_dir / args.shape)
    graph_dir = export_cached(checkpoint, args.work_dir / "exported", ExportOptions())
    plain = Config(batch_size=max(args.requests), enable_prefix_caching=False, max_num_batched_tokens=2048)
    executor, model = make_executor(graph_dir, plain), Manifest.read(graph_dir)
    collect_garbage_seldom()
    num_blocks = allocate_cache(executor, plain, model.max_seq_len)
    rows = []
    for count in args.requests:
        for name, script in scripts(count, model.vocab_size).items():
            rates: dict[str, list[float]] = {method: [] for method in ("none", *args.methods)}
            accepted, policies = {}, {method: DraftPolicy() for method in rates}  # which learn over all rounds
            for _ in range(args.rounds):
                for method, measured in rates.items():
                    config = plain.changed(speculate_method=method)
                    scripted: Executor = Scripted(executor, script[1])  # type: ignore[assignment]
                    drafting = with_speculation(scripted, config, policies[method])
                    rate, accepted[method] = measure(drafting, num_blocks, config, script[0])
                    measured.append(rate)
            off = statistics.median(rates.pop("none"))
            for method, measured in rates.items():
                on = statistics.median(measured)
                rows.append({"requests": count, "answers": name, "method": method, "off": off, "on": on,
                             "accepted": accepted[method]})  # fmt: skip
                print(f"{count:3} x {name:8} {off:8.1f} tok/s without, {on:8.1f} with {method}: {on / off:5.2f}, "
                      f"{accepted[method]:.0%} of the drafted tokens accepted", flush=True)  # fmt: skip
    executor.close()
    print(json.dumps({"hardware": cpu_name(), "shape": args.shape, "rows": rows}))


if __name__ == "__main__":
    main()
