"""Updates of requests: the tokens that a step has sampled for a request, and whether its answer has ended. Independent
of steps, blocks and slots."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.core.types import NO_TOKEN, Grammar, Logprobs, PromptOutputs, Request
from engine.errors import InvalidRequest, RequestError

FAILED = "failed"


class Update(msgspec.Struct, frozen=True):
    """New tokens of a request and, with the last ones, the finish reason; or no tokens and the reason FAILED."""

    request: Request
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs] | None
    finish_reason: str | None
    error: RequestError | None = None  # set if it FAILED
    prompt_outputs: PromptOutputs | None = None  # set in the first update


def append(request: Request, token_ids: Sequence[int], logprobs: Sequence[Logprobs] | None) -> Update:
    """Append sampled tokens to a request and return its update. Tokens after the end of the answer are ignored.
    NO_TOKEN, which may also follow accepted drafts, fails the request."""
    if len(token_ids) == 1 and token_ids[0] != NO_TOKEN:
        return Update(request, token_ids, logprobs, request.append(token_ids[0]))
    for count, token_id in enumerate(token_ids, 1):
        if token_id == NO_TOKEN:
            return Update(request, (), None, FAILED, _error_of_bans(request))
        if finish_reason := request.append(token_id):
            if count < len(token_ids):  # draft tokens that are correct, but follow the end
                token_ids, logprobs = token_ids[:count], logprobs and logprobs[:count]
            return Update(request, token_ids, logprobs, finish_reason)
    return Update(request, token_ids, logprobs, None)


def _error_of_bans(request: Request) -> RequestError | None:
    """Return the error of a request whose own bans can have left no token, or None if only the model can be to
    blame."""
    if not request.sampling.bad_words:
        return None
    text = "The `{field}` leave no token that may follow the answer so far, or the model's logits are no numbers"
    return InvalidRequest(text, field="bad_words")


def check_grammar(grammar: Grammar, update: Update) -> Update:
    """Return `update`, or its replacement if the grammar, which has been advanced by its tokens, has an error or is
    complete. A complete answer ends without a step for its stop id."""
    request, token_ids, logprobs = update.request, update.token_ids, update.logprobs
    if grammar.error:
        return Update(request, (), None, FAILED, grammar.error)
    if update.finish_reason or not grammar.is_complete:
        return update
    stop_id = request.sampling.stop_token_ids[0]
    finish_reason = request.append(stop_id)
    return Update(request, [*token_ids, stop_id], logprobs and [*logprobs, Logprobs(0.0)], finish_reason)
