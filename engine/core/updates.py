"""What a step has brought a request: its answer grows, and may end. Knows no steps, no blocks, no slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.core.types import NO_TOKEN, Grammar, Logprobs, PromptOutputs, Request
from engine.errors import RequestError

FAILED = "failed"
make = tuple.__new__  # of a NamedTuple: a third of the time that its own constructor takes, once a row


class Update(NamedTuple):
    """Of one request: tokens, and why the last was the last if it was; or none, and it FAILED."""

    request: Request
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs] | None
    finish_reason: str | None
    error: RequestError | None = None  # of one that FAILED
    prompt_outputs: PromptOutputs | None = None  # with the first one


def append(request: Request, token_ids: Sequence[int], logprobs: Sequence[Logprobs] | None) -> Update:
    if token_ids[0] == NO_TOKEN:
        return Update(request, (), None, FAILED)
    if len(token_ids) == 1:
        return make(Update, (request, token_ids, logprobs, request.append(token_ids[0]), None, None))
    for count, token_id in enumerate(token_ids, 1):
        if finish_reason := request.append(token_id):
            if count < len(token_ids):  # what follows was drafted well, but is beyond the end
                token_ids, logprobs = token_ids[:count], logprobs and logprobs[:count]
            return Update(request, token_ids, logprobs, finish_reason)
    return Update(request, token_ids, logprobs, None)


def follow(grammar: Grammar, update: Update) -> Update:
    """Return `update` as its grammar wants it, which has been told of its tokens. Where nothing may come any more the
    answer ends, without a step for the stop id."""
    request, token_ids, logprobs, finish_reason, *_ = update
    if grammar.error:
        return Update(request, (), None, FAILED, grammar.error)
    if finish_reason or not grammar.is_complete:
        return update
    stop_id = request.sampling.stop_token_ids[0]
    finish_reason = request.append(stop_id)
    return Update(request, [*token_ids, stop_id], logprobs and [*logprobs, Logprobs(0.0)], finish_reason)
