"""Tokens that a model with states computes of prompts that begin alike, compared with an attention-only model.

    python -m benchmarks.shared_prefixes
    python -m benchmarks.shared_prefixes --long

Two models with random weights, equal in all sizes, of which the second has three layers of Gated DeltaNet before each
layer of attention. Prompts arrive one after another, in the form of ChatML, whose messages end with a stop token.
"without message ends": requests have no stop tokens, so that states are kept only at the end of a prompt and where
prompts branch off. With --long, the models are larger, behind a longer system prompt, and the processor time of one
thread to the first token of each answer is shown, too. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.bench import prompt_ids
from benchmarks.random_checkpoint import make_checkpoint
from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.executors import make_executor
from engine.exporting.cache import export_cached
from engine.exporting.export import ExportOptions
from engine.settings.config import Config

NUM_BLOCKS, VOCAB_SIZE = 2000, 2048
SHAPES, LONG_SHAPES = ("tiny-moe", "tiny-hybrid"), ("attention-0.2b", "hybrid-0.2b")
END, NEWLINE, HEADER = 2, 3, [4, 5, 6]  # of a message
COLUMNS = {"attention only": (0, (END,)), "hybrid": (1, (END,)), "hybrid without message ends": (1, ())}
Answer = Callable[[list[int]], list[int]]


class Server:
    """One model with an empty prefix cache."""

    def __init__(self, work_dir: Path, shape: str, stop_token_ids: tuple[int, ...], answer_len: int):
        checkpoint = make_checkpoint(shape, work_dir / shape)
        graph_dir = export_cached(checkpoint, work_dir / "exported", ExportOptions())
        config = Config(cpu_threads=1)
        self.executor = executor = make_executor(graph_dir, config)
        executor.allocate(NUM_BLOCKS)
        self._loop = EngineLoop(executor, NUM_BLOCKS, config)
        self._sampling = Sampling(answer_len, temperature=0, stop_token_ids=stop_token_ids)
        self.computed: list[int] = []  # tokens of each prompt
        self.milliseconds: list[int] = []  # of the processor until its first token

    def answer(self, prompt: list[int]) -> list[int]:
        request = Request("one", list(prompt), len(prompt), self._sampling)
        self._loop.add(request)
        started, first_at = time.process_time(), 0.0
        while not self._loop.is_idle:
            self._loop.step()
            if request.num_new_tokens and not first_at:
                first_at = time.process_time()
        self.milliseconds.append(round(1e3 * (first_at - started)))
        self.computed.append(len(prompt) - request.num_cached)
        return request.token_ids[len(prompt) :]


def message(rng: np.random.Generator, length: int) -> list[int]:
    return [*HEADER, *prompt_ids(rng, VOCAB_SIZE, length), END, NEWLINE]


def questions(
    beginning: list[int], rng: np.random.Generator, answer: Answer, length: int = 200, count: int = 3
) -> None:
    """Ask different questions behind the same messages."""
    for _ in range(count):
        answer(beginning + message(rng, length) + HEADER)


def system_prompt(rng: np.random.Generator, answer: Answer) -> None:
    questions(message(rng, 1000), rng, answer)


def long_system_prompt(rng: np.random.Generator, answer: Answer) -> None:
    questions(message(rng, 4091), rng, answer, length=60, count=6)


def examples(rng: np.random.Generator, answer: Answer) -> None:
    questions([each for length in (100, *(150, 250) * 4) for each in message(rng, length)], rng, answer)


def conversation(rng: np.random.Generator, answer: Answer) -> None:
    prompt = message(rng, 100)
    for _ in range(4):
        prompt += message(rng, 200) + HEADER
        prompt += [each for each in answer(prompt) if each != END] + [END, NEWLINE]


def text(rng: np.random.Generator, answer: Answer) -> None:
    beginning = prompt_ids(rng, VOCAB_SIZE, 1000)
    for _ in range(3):
        answer(beginning + prompt_ids(rng, VOCAB_SIZE, 200))


TRAFFIC = {
    "system prompt of 1,000 tokens, three questions of 200": system_prompt,
    "system prompt of 100 tokens and eight examples of 1,600, three questions": examples,
    "conversation with questions and answers of 200 tokens": conversation,
    "text of 1,000 tokens without messages, three ends of 200": text,
}
LONG_TRAFFIC = {"system prompt of 4,096 tokens, six questions of 60": long_system_prompt}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, default=Path("build/bench"))
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--answer-len", type=int, default=200)
    args, rows = parser.parse_args(), []
    shapes = LONG_SHAPES if args.long else SHAPES
    for name, ask in (LONG_TRAFFIC if args.long else TRAFFIC).items():
        print(name)
        for column, (index, stop_token_ids) in COLUMNS.items():
            server = Server(args.work_dir, shapes[index], stop_token_ids, args.answer_len)
            ask(np.random.default_rng(0), server.answer)
            server.executor.close()
            row = {"traffic": name, "model": column, "tokens": server.computed}
            if args.long:
                row["ms"] = server.milliseconds
            print(f"  {column}: " + ", ".join(f"{each} {row[each]}" for each in ("tokens", "ms") if each in row))
            rows.append(row)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
