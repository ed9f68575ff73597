"""Checks of requests for outputs of the prompt itself: prompt log-probabilities, embeddings and scores."""

from __future__ import annotations

from engine.errors import InvalidRequest
from engine.wire import SCORE, GenerationRequest

MAX_PROMPT_LOGPROBS = 1 << 17  # per request, about 100 bytes each


def check_classifier(request: GenerationRequest, has_classifier: bool) -> None:
    """Raise InvalidRequest unless the model has a classifier exactly if the request asks for scores."""
    if request.pooling == SCORE and not has_classifier:
        text = "The `{field}` is {value}, which needs a checkpoint with a head that scores"
        raise InvalidRequest(text, field="pooling", value=SCORE)
    if has_classifier and not request.pooling and request.max_dec_len != 0:
        raise InvalidRequest("This model scores prompts and writes no answers: `{field}`", field="pooling")


def check_prompt_outputs(request: GenerationRequest, prompt_len: int) -> None:
    """Raise InvalidRequest if the prompt outputs do not go with other fields, or exceed MAX_PROMPT_LOGPROBS."""
    if request.pooling and request.prompt_logprobs >= 0:
        raise InvalidRequest(
            "The `{field}` is not for embeddings", field="prompt_logprobs", value=request.prompt_logprobs
        )
    if request.pooling or request.max_dec_len == 0:
        for name, value in (("n", request.n), ("best_of", request.best_of or 1)):
            if value > 1:
                text = "The `{field}` must be {limit} if no answer is generated, it is {value}"
                raise InvalidRequest(text, field=name, value=value, limit=1)
        if request.use_beam_search:
            raise InvalidRequest("The `{field}` needs an answer of at least one token", field="use_beam_search")
    num_logprobs = request.n * prompt_len * (request.prompt_logprobs + 1)
    if num_logprobs > MAX_PROMPT_LOGPROBS:
        text = (
            f"The `{{field}}` of {prompt_len} tokens, with the likeliest in the place of each, are {{value}} numbers, "
        )
        text += "the limit is {limit}"
        raise InvalidRequest(text, field="prompt_logprobs", value=num_logprobs, limit=MAX_PROMPT_LOGPROBS)
