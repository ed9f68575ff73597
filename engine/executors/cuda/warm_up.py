"""Warm-up steps that together launch every kernel that a request can reach. They run before the server is ready, so
that no request waits for a compiler or for what a library sets up at its first call. Independent of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from engine.core.types import Arrival, Batch, PromptOutputSpec, Row, Sampling
from engine.sampling_parameters import PARAMETERS

GREEDY = Sampling(max_new_tokens=2, temperature=0)
# One request for each mode of the sampler; log-probabilities keep the step from replaying a captured graph.
EACH_MODE = tuple(
    Sampling(max_new_tokens=2, temperature=temperature, top_k=top_k, top_p=top_p, num_logprobs=1)
    for temperature, top_k, top_p in ((0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 2, 1.0), (1.0, 0, 0.5), (1.0, 2, 0.5))
)
NOT_CAPTURED: Any = {each.name: each.high for each in PARAMETERS if not each.is_captured}
ADJUSTED = Sampling(
    max_new_tokens=4,
    min_new_tokens=1,
    **NOT_CAPTURED,
    stop_token_ids=(1,),
    bad_words=((2,), (3, 4)),
    logit_bias=((5, 1.0),),
)


class StepLimits(NamedTuple):
    """Bounds of a step: what the cache and the settings allow."""

    max_tokens: int  # of one step
    max_context: int  # tokens of one request, limited by the blocks of the cache
    max_requests: int
    block_size: int
    max_prompt_logits: int  # tokens of a step whose logits may be reported
    num_groups: int = 1  # cache groups


def warm_up_batches(limits: StepLimits, fresh_lengths: Sequence[int]) -> Iterator[Batch]:
    """Yield batches of every kind: prompts of all size classes, new and continued, many short ones, mixtures with
    decoding requests, all ways of sampling, and prompts whose log-probabilities and hidden states are wanted.

    `fresh_lengths`: lengths of new prompts for which a library prepares a plan of its own. Blocks are shared by all
    requests of a batch, because their content does not matter.
    """
    build = _Builder(limits)
    for length in _sizes(limits.max_tokens):
        yield build.batch([(0, length, GREEDY)])
    for length in fresh_lengths:
        yield build.batch([(0, length, GREEDY)])
        yield build.batch([(1, 1, GREEDY), (0, length, GREEDY)])
    for count in _sizes(limits.max_requests):
        yield build.batch([(0, 513 // count + 1, GREEDY)] * count)
        yield build.batch([(1, 1, GREEDY)] * count)
    yield build.batch([(1, 600, GREEDY)])
    yield build.batch([(1, 1, GREEDY), (0, 600, GREEDY)])
    for sampling in (*EACH_MODE, ADJUSTED):
        yield build.batch([(1, 1, sampling)] * 2)
    yield build.batch([(1, 1, GREEDY)] * 2)._replace(has_mask=True)
    for length in _sizes(min(limits.max_prompt_logits, limits.max_tokens)):
        yield build.read(length)


def _sizes(most: int) -> list[int]:
    """Return one size for each class by which kernels are chosen: 1, 2, then 2^k + 1, and `most`."""
    return sorted({size for size in (1, 2, *(2**k + 1 for k in range(3, 20))) if size < most} | {most})


class _Builder:
    """Builder of batches within the limits of a step."""

    def __init__(self, limits: StepLimits):
        self._limits = limits

    def batch(self, parts: Sequence[tuple[int, int, Sampling]]) -> Batch:
        """Build a batch of rows, each given by its cached tokens (0 or 1 for "some"), its tokens and its sampling.
        Rows that exceed the limits are shortened, or left out where no token is left."""
        limits, rows, arrivals = self._limits, [], []
        left = limits.max_tokens
        for slot, (has_context, length, sampling) in enumerate(parts[: limits.max_requests]):
            start = min(limits.block_size, limits.max_context - 1) if has_context else 0
            length = min(length, left, limits.max_context - start)
            if length < 1:
                break
            left -= length
            token_ids = [0] * (start + length)
            arrivals.append(Arrival(slot, token_ids, len(token_ids), sampling))
            blocks = range(-(-len(token_ids) // limits.block_size))
            rows.append(Row(slot, start, token_ids[start:], [blocks] * limits.num_groups))
        return Batch(rows, arrivals)

    def read(self, num_tokens: int) -> Batch:
        """Build a prompt of `num_tokens` whose log-probabilities and mean hidden state are wanted."""
        batch = self.batch([(0, num_tokens, GREEDY)])
        count = len(batch.rows[0].token_ids)
        spec = PromptOutputSpec(scored_ids=[0] * (count - 1), num_logprobs=1, num_pooled=count, returns_pooled=True)
        return batch._replace(rows=[replace(batch.rows[0], prompt_spec=spec)], has_prompt_outputs=True)
