"""Small models that take prompt spans, and prompts whose spans have the embeddings of ordinary tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from engine.core.executor import Executor
from engine.core.loop import EngineLoop
from engine.core.spans import PromptSpan
from engine.core.types import Request, Sampling
from engine.dtypes import as_f32
from engine.exporting.export import ExportOptions, export
from engine.graph import load
from engine.models.families import FAMILIES
from engine.models.qwen2 import Qwen2
from engine.settings.config import Config
from tests.checkpoints import COMMON

BLOCK_SIZE = 16
PLACEHOLDER = 7  # the token id of what a span covers
MROPE = {"type": "mrope", "mrope_section": [3, 2, 3]}  # of a head with 16 elements

Answers = dict[int, list[tuple[int, Any]]]  # by request: the tokens with their log-probabilities


@dataclass(frozen=True, kw_only=True)
class SpanQwen2(Qwen2):
    takes_spans: bool = True


def export_with_spans(checkpoint: Path, directory: Path, rope_scaling: dict[str, Any] | None = None, **options) -> Path:
    """Export a checkpoint of the family qwen2 as a model that takes prompt spans."""
    overrides = json.dumps({"rope_scaling": rope_scaling}) if rope_scaling else ""
    with patch.dict(FAMILIES, {"qwen2": SpanQwen2}):
        export(checkpoint, directory, ExportOptions(hf_overrides=overrides, block_size=BLOCK_SIZE, **options))
    return directory


def table_of(graph_dir: Path) -> np.ndarray:
    """Return the embeddings f32 [V, H] of a model of one rank."""
    return as_f32(load(graph_dir)[1]["embed_tokens.weight"])


def random_requests(seed: int, count: int = 12, vocab_size: int = 300) -> list[Request]:
    """Return requests of ordinary tokens, which share beginnings, of lengths around the borders of blocks and
    chunks."""
    rng = random.Random(seed)
    stems = [[rng.randrange(vocab_size) for _ in range(70)] for _ in range(3)]
    requests = []
    for number in range(count):
        stem = rng.choice(stems)[: rng.choice([15, 16, 17, 48, 64, 70])]
        prompt = stem + [rng.randrange(vocab_size) for _ in range(rng.randint(1, 30))]
        temperature = rng.choice([0.0, 1.0])
        sampling = Sampling(rng.randint(20, 60), temperature=temperature, seed=rng.randrange(2**63), num_logprobs=1)
        requests.append(Request(str(number), prompt, len(prompt), sampling))
    return requests


def with_spans(request: Request, table: np.ndarray, seed: int) -> Request:
    """Return the same request where parts of its prompt are spans with the embeddings of the tokens there."""
    rng, token_ids, spans = random.Random(seed), list(request.token_ids), []
    start = rng.randrange(12)
    while start < len(token_ids):
        length = min(rng.choice([1, 5, 16, 40]), len(token_ids) - start)
        covered = token_ids[start : start + length]
        spans.append(PromptSpan(start, length, bytes(str(covered), "ascii"), table[covered].tobytes()))
        token_ids[start : start + length] = [PLACEHOLDER] * length
        start += length + rng.choice([0, 1, 20])
    return Request(request.request_id, token_ids, request.prompt_len, request.sampling, spans=spans)


def an_image(start: int, rows: int, columns: int, seed: int = 0, frames: int = 1) -> PromptSpan:
    """Return a span with a grid and random embeddings."""
    length = frames * rows * columns
    numbers = np.random.default_rng(seed).standard_normal((length, COMMON["hidden_size"])).astype(np.float32)
    return PromptSpan(start, length, bytes([seed]), numbers.tobytes(), (frames, rows, columns))


PROMPT_WITH_IMAGES = [5, 6, *[PLACEHOLDER] * 12, 8, *[PLACEHOLDER] * 30, 9, 10]
IMAGES = [an_image(2, 3, 4), an_image(15, 5, 6, seed=1)]


def a_loop(executor: Executor, config: Config, num_blocks: int = 200) -> EngineLoop:
    executor.allocate(num_blocks)
    return EngineLoop(executor, num_blocks, config)


def answers_of(loop: EngineLoop, requests: Sequence[Request]) -> Answers:
    """Return the answers to copies of the requests, with their log-probabilities to the last bit."""
    answers: Answers = {}
    for each in requests:
        loop.add(Request(each.request_id, list(each.token_ids), each.prompt_len, each.sampling, spans=each.spans))
        answers[int(each.request_id)] = []
    while not loop.is_idle:
        for update in loop.step():
            answers[int(update.request.request_id)] += zip(update.token_ids, update.logprobs or (), strict=True)
    loop.scheduler.check()
    return answers
