"""Outputs of prompts: log-probabilities of their tokens and pooled hidden states. Decides which outputs a chunk of a
prompt has to produce, and collects them in the request."""

from __future__ import annotations

from engine.core.types import MEAN, PromptOutputs, PromptOutputSpec, Request, Row
from engine.errors import InvalidRequest


def refuse_if_wanted(request: Request) -> None:
    """Raise InvalidRequest if `request` wants outputs of its prompt, which the executor does not support."""
    sampling = request.sampling
    for field, is_wanted in (("prompt_logprobs", sampling.num_prompt_logprobs >= 0), ("pooling", sampling.pooling)):
        if is_wanted:
            raise InvalidRequest("The `{field}` is not supported on the device of this server", field=field)


def spec_of_chunk(request: Request, start: int, is_last: bool) -> PromptOutputSpec | None:
    """Return the outputs that the prompt tokens from `start` to `num_computed` have to produce. `is_last`: the prompt
    ends with them."""
    sampling, end = request.sampling, request.num_computed
    if sampling.pooling:
        num_pooled = end - start if sampling.pooling == MEAN else int(is_last)
        return PromptOutputSpec(num_pooled=num_pooled, returns_pooled=is_last) if num_pooled else None
    if sampling.num_prompt_logprobs < 0 or start + 1 == request.prompt_len:
        return None
    return PromptOutputSpec(request.token_ids[start + 1 : end + 1], sampling.num_prompt_logprobs)


def collect(request: Request, row: Row, outputs: PromptOutputs) -> bool:
    """Add the outputs of a chunk to `request`. Return False if the model has broken down: they are not numbers."""
    assert row.prompt_spec
    request.prompt_logprobs += outputs.prompt_logprobs
    request.pooled = outputs.pooled
    is_complete = bool(outputs.pooled) or not row.prompt_spec.returns_pooled
    return is_complete and all(each.chosen == each.chosen for each in outputs.prompt_logprobs)


def take(request: Request) -> PromptOutputs:
    """Return all outputs of the prompt for the first update of `request`, and note that they are sent."""
    request.prompt_outputs_sent = True
    # A preempted request finds its own blocks in the prefix cache, which do not count, and neither do pulled ones.
    num_cached = 0 if request.num_preemptions else max(0, request.num_cached - request.num_pulled)
    return PromptOutputs(request.prompt_logprobs, request.pooled, num_cached, request.began_at)


def is_finished_by(request: Request, row: Row) -> bool:
    """Return whether `row` finishes a request that wants outputs of its prompt only."""
    return request.sampling.max_new_tokens == 0 and row.start + len(row.token_ids) == request.prompt_len
