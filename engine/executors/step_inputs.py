"""From a batch to the arrays of a step: the graph's inputs and the sampler's rows. The same for every executor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from engine.core.types import Batch, Logprobs, Request, Sampling, StepOutput
from engine.ops.sampling_rows import SampledRows, SamplingRows


def graph_inputs(batch: Batch) -> dict[str, np.ndarray]:
    """The inputs of docs/ops.md but for the caches: i32, by name."""
    chunks = batch.chunks
    lengths = np.array([chunk.num_tokens for chunk in chunks], np.int32)
    query_starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    tables = [chunk.request.block_ids for chunk in chunks]
    block_tables = np.zeros((len(chunks), max(map(len, tables))), np.int32)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    return {
        "token_ids": np.concatenate(
            [np.array(chunk.request.token_ids[chunk.start : chunk.end], np.int32) for chunk in chunks]
        ),
        "positions": np.concatenate([np.arange(chunk.start, chunk.end, dtype=np.int32) for chunk in chunks]),
        "query_starts": query_starts,
        "context_lens": np.array([chunk.start for chunk in chunks], np.int32),
        "block_tables": block_tables,
        "logit_rows": np.array(
            [end - 1 for end, chunk in zip(query_starts[1:], chunks, strict=True) if chunk.samples], np.int32
        ),
    }


def sampling_rows(requests: Sequence[Request]) -> SamplingRows:
    """One row for each request that gets a token in this step."""
    rows = SamplingRows.greedy(len(requests))
    seen = [_seen(request) for request in requests]
    bias = [list(_bias(request)) for request in requests]
    for row, request in enumerate(requests):
        sampling = request.sampling
        rows.temperature[row] = sampling.temperature
        rows.top_p[row], rows.top_k[row], rows.min_p[row] = sampling.top_p, sampling.top_k, sampling.min_p
        rows.repetition_penalty[row] = sampling.repetition_penalty
        rows.frequency_penalty[row] = sampling.frequency_penalty
        rows.presence_penalty[row] = sampling.presence_penalty
        rows.seed[row], rows.counter[row] = sampling.seed, request.num_new_tokens
        rows.num_logprobs[row] = sampling.num_logprobs
    rows.seen_starts[1:] = np.cumsum([len(items) for items in seen])
    rows.seen_ids = np.fromiter(chain.from_iterable(seen), np.int32, rows.seen_starts[-1])
    rows.seen_counts = np.fromiter(chain.from_iterable(items.values() for items in seen), np.int32, len(rows.seen_ids))
    rows.bias_starts[1:] = np.cumsum([len(items) for items in bias])
    rows.bias_ids = np.array([token_id for items in bias for token_id, _ in items], np.int32)
    rows.bias = np.array([value for items in bias for _, value in items], np.float32)
    return rows


def step_output(sampled: SampledRows, requests: Sequence[Request]) -> StepOutput:
    token_ids = sampled.token_ids.tolist()
    logprobs: list[Logprobs | None] = []
    for row, request in enumerate(requests):
        count = request.sampling.num_logprobs
        if count < 0:
            logprobs.append(None)
            continue
        top = zip(sampled.top_ids[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist(), strict=True)
        logprobs.append(Logprobs(float(sampled.logprobs[row]), tuple(pair for pair in top if pair[0] >= 0)))
    return StepOutput(token_ids, logprobs)


def _seen(request: Request) -> Counter[int]:
    """Empty when no penalty reads it."""
    sampling = request.sampling
    penalized = sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty
    return request.seen if penalized else Counter()


def _bias(request: Request) -> Iterator[tuple[int, float]]:
    sampling = request.sampling
    yield from sampling.logit_bias
    yield from ((token_id, -np.inf) for token_id in _banned(request, sampling))


def _banned(request: Request, sampling: Sampling) -> Iterator[int]:
    if request.num_new_tokens < sampling.min_new_tokens:
        yield from sampling.stop_token_ids
    for *head, last in sampling.bad_words:
        # A longer word is banned at its last token, once the answer ends with the tokens before it.
        if len(head) <= request.num_new_tokens and request.token_ids[len(request.token_ids) - len(head) :] == head:
            yield last
