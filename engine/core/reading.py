"""What requests ask of their prompts: which chunk tells what, and what of it has come. Knows no steps and no blocks."""

from __future__ import annotations

from engine.core.types import MEAN, OfPrompt, Reading, Request, Row
from engine.errors import InvalidRequest


def refuse(request: Request) -> None:
    """Where the executor has no readings. Raises InvalidRequest."""
    sampling = request.sampling
    for field, is_wanted in (("prompt_logprobs", sampling.num_prompt_logprobs >= 0), ("pooling", sampling.pooling)):
        if is_wanted:
            raise InvalidRequest("The `{field}` is not supported on the device of this server", field=field)


def of_chunk(request: Request, start: int, is_last: bool) -> Reading | None:
    """Of the tokens of its prompt from `start` to `num_computed`."""
    sampling, end = request.sampling, request.num_computed
    if sampling.pooling:
        num_pooled = end - start if sampling.pooling == MEAN else int(is_last)
        return Reading(num_pooled=num_pooled, is_told=is_last) if num_pooled else None
    if sampling.num_prompt_logprobs < 0 or start + 1 == request.prompt_len:
        return None
    return Reading(request.token_ids[start + 1 : end + 1], sampling.num_prompt_logprobs)


def keep(request: Request, row: Row, told: OfPrompt) -> bool:
    """False when the model has broken down: what it has told are no numbers."""
    assert row.reading
    request.scores += told.scores
    request.hidden = told.hidden
    is_whole = bool(told.hidden) or not row.reading.is_told
    return is_whole and all(score.chosen == score.chosen for score in told.scores)


def whole(request: Request) -> OfPrompt:
    """All of it, once."""
    request.is_told = True
    num_cached = 0 if request.num_preemptions else request.num_cached  # of one that came back, its own
    return OfPrompt(request.scores, request.hidden, num_cached, request.began_at)


def ends_with(request: Request, row: Row) -> bool:
    """A request that wants no token, with the last of its prompt."""
    return request.sampling.max_new_tokens == 0 and row.start + len(row.token_ids) == request.prompt_len
