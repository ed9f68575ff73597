"""Messages between the Triton model and the engine process over ZeroMQ: msgpack arrays that start with their kind.

Every message contains its `epoch`, "process/connection": a random name of the engine process, and one of the
connection. With it both sides recognise messages for a process that has died or from a connection that was lost.

All messages to the engine are checked here, because an invalid message must not end the process that serves everyone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

import msgpack

from engine.core.spans import PromptSpan
from engine.core.types import Logprobs, PromptOutputs, Request, Sampling
from engine.errors import RequestError, error_of
from engine.sampling_parameters import MAX_INT, PARAMETERS
from engine.settings.config import Config
from engine.settings.replicas import ADDRESS
from engine.wire.checks import MAX_LOGPROBS, MAX_N, POOLINGS

PING = "ping"  # client -> engine: []                                       expects a pong; also "I am alive"
# client -> engine: [epoch, prompt ids, [[request_id, sampling, answer so far], ...], replay, salt, [owner, priority],
#                    [[start, length, content hash, grid, pixels], ...] of each image, cached_at of Request]
SUBMIT = "submit"
CANCEL = "cancel"  # client -> engine: [epoch, request_id, whether its answer is complete]
EXPIRE = "expire"  # client -> engine: [epoch, request_id, error kind, text, cause]  refused with this if it still waits
PONG = "pong"  # engine -> client: [epoch, stats]; while it starts the stats are {STARTING: why}
# engine -> client: [epoch, [[request_id, token_ids, logprobs of each, finish_reason, prompt outputs], ...]]
TOKENS = "tokens"
STARTING = "starting"
COMPILING = (
    "compiling"  # engine -> client: [epoch, request_id]  its grammar takes long to compile: nothing is computed yet
)
REFUSED = "refused"  # engine -> client: [epoch, request_id, error kind, text, cause]

ID_BYTES = 5  # of a token id, at most
# 64 bad words of 1,024 characters, with and without a space, one token per byte; a grammar of MAX_GRAMMAR_BYTES, where
# every character may be escaped, and what its translation adds; and the remaining fields
SAMPLING_BYTES = 4 << 20
SPAN_BYTES = 100  # of an image, beside its pixels
PIXEL_BYTES = 3 * 32 * 32  # of a token of an image, at most in the supported families
MAX_REQUEST_ID_LEN = 64
RANGES: dict[str, tuple[float, float]] = {
    "max_new_tokens": (0, MAX_INT),
    "min_new_tokens": (0, MAX_INT),
    "seed": (0, 2**64 - 1),
    "num_logprobs": (-1, MAX_LOGPROBS),
    "num_beams": (0, MAX_N),
    "length_penalty": (-10.0, 10.0),
    "num_prompt_logprobs": (-1, MAX_LOGPROBS),
    **{each.name: (each.type(each.low), each.type(each.high)) for each in PARAMETERS},
}


class ModelBounds(NamedTuple):
    """Limits of the model, beyond which the executor would access arrays out of bounds."""

    vocab_size: int = MAX_INT
    max_len: int = MAX_INT  # tokens of a request


ANY = ModelBounds()


def most_bytes(config: Config) -> int:
    """Return the maximum size of a message to the engine, in bytes."""
    prompt_bytes = (ID_BYTES + PIXEL_BYTES) * config.max_prompt_len + SPAN_BYTES * config.max_images
    return prompt_bytes + MAX_N * (ID_BYTES * config.max_answer_len + SAMPLING_BYTES)


def pack(kind: str, *fields: Any) -> bytes:
    return msgpack.packb((kind, *fields))


def unpack(message: bytes) -> tuple[str, Sequence[Any]]:
    """Return kind and fields of a message. Raises ValueError if `pack` has not made it."""
    try:
        content = msgpack.unpackb(message, use_list=False)
    except Exception as error:  # the library raises several types
        raise ValueError(f"the message is no msgpack: {type(error).__name__}") from None
    if not isinstance(content, tuple) or not content or not isinstance(content[0], str):
        raise ValueError("the message is no array with a kind")
    return content[0], content[1:]


def unpack_submission(fields: Sequence[Any], bounds: ModelBounds) -> tuple[list[Request], bool]:
    """Return one request per answer, and whether the submission is a replay. Raises ValueError."""
    _, prompt_ids, answers, replay, salt, queue_position, packed_spans, cached_at = fields  # a ValueError, too
    _check(_are_ids(prompt_ids, bounds) and len(prompt_ids) > 0, "prompt")
    _check(isinstance(answers, tuple) and 0 < len(answers) <= MAX_N, "number of answers")
    _check(isinstance(replay, bool), "replay")
    _check(isinstance(salt, str), "salt")
    _check(isinstance(queue_position, tuple) and tuple(map(type, queue_position)) == (str, int), "queue_position")
    _check(isinstance(cached_at, str) and (not cached_at or bool(ADDRESS.fullmatch(cached_at))), "cached_at")
    owner, priority = queue_position
    spans = _unpack_spans(packed_spans, len(prompt_ids))
    requests = [_unpack_answer(answer, prompt_ids, bounds) for answer in answers]
    for request in requests:
        request.salt, request.owner, request.priority, request.spans = salt, owner, priority, spans
        request.cached_at = cached_at
    _check(len({request.request_id for request in requests}) == len(requests), "ids: one twice")
    return requests, replay


def pack_spans(spans: Sequence[PromptSpan]) -> list[tuple[Any, ...]]:
    return [(span.start, span.length, span.content_hash, span.grid, span.pixels) for span in spans]


def _unpack_spans(fields: Any, prompt_len: int) -> list[PromptSpan]:
    """Return the images of a prompt, in order and without overlap. Raises ValueError."""
    _check(isinstance(fields, tuple), "spans")
    spans, end = [], 0
    for each in fields:
        _check(isinstance(each, tuple) and tuple(map(type, each)) == (int, int, bytes, tuple, bytes), "span")
        start, length, content_hash, grid, pixels = each
        _check(length > 0 and end <= start and start + length <= prompt_len, "span: its place")
        is_grid = tuple(map(type, grid)) == (int, int, int) and min(grid) > 0 and math.prod(grid) == length
        _check(is_grid and len(pixels) > 0 and len(pixels) % (3 * length) == 0, "span: its grid")
        spans.append(PromptSpan(start, length, content_hash, b"", grid, pixels))
        end = start + length
    return spans


def unpack_cancel(fields: Sequence[Any]) -> tuple[str, bool]:
    """Return the id of the request, and whether its answer is complete. Raises ValueError."""
    _check(len(fields) == 3 and _is_request_id(fields[1]) and isinstance(fields[2], bool), "cancellation")
    return fields[1], fields[2]


def unpack_expiry(fields: Sequence[Any]) -> tuple[str, RequestError]:
    """Return the id of the request, and the error to refuse it with. Raises ValueError."""
    _, request_id, kind, text, cause = fields  # a ValueError, too
    _check(_is_request_id(request_id) and isinstance(kind, str) and isinstance(text, str), "expiry")
    _check(isinstance(cause, dict) and cause.keys() <= {"field", "value", "limit"}, "cause")
    return request_id, error_of(kind, text, **cause)


def pack_sampling(sampling: Sampling) -> tuple[Any, ...]:
    return astuple(sampling)


def unpack_sampling(fields: Any, bounds: ModelBounds) -> Sampling:
    """Return the sampling parameters after checking them against RANGES and `bounds`. Raises ValueError."""
    _check(isinstance(fields, tuple) and len(fields) == len(Sampling.__dataclass_fields__), "sampling")
    sampling = Sampling.of(fields)
    for name, (low, high) in RANGES.items():
        value = getattr(sampling, name)
        kinds = (int,) if isinstance(low, int) else (int, float)
        _check(type(value) in kinds and low <= value <= high, name)
    _check(_are_ids(sampling.stop_token_ids, bounds), "stop_token_ids")
    _check(sampling.pooling in ("", *POOLINGS), "pooling")
    structured_output = sampling.structured_output
    is_pair = isinstance(structured_output, tuple) and tuple(map(type, structured_output)) == (str, str)
    _check(structured_output == () or is_pair, "structured_output")
    adapter = sampling.adapter
    _check(adapter == () or (isinstance(adapter, tuple) and tuple(map(type, adapter)) == (str, str)), "adapter")
    words, biases = sampling.bad_words, sampling.logit_bias
    _check(isinstance(words, tuple) and all(_are_ids(word, bounds) and word for word in words), "bad_words")
    pairs = isinstance(biases, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in biases)
    _check(pairs and _are_ids(tuple(token_id for token_id, _ in biases), bounds), "logit_bias")
    _check(all(type(bias) in (int, float) and abs(bias) <= 100 for _, bias in biases), "logit_bias")
    return sampling


def pack_prompt_outputs(outputs: PromptOutputs | None) -> tuple[Any, ...] | None:
    if outputs is None:
        return None
    return pack_logprobs(outputs.prompt_logprobs), outputs.pooled, outputs.num_cached, outputs.began_at


def unpack_prompt_outputs(fields: tuple[Any, ...]) -> PromptOutputs:
    scores, *others = fields
    return PromptOutputs(unpack_logprobs(scores) or (), *others)


def pack_logprobs(logprobs: Sequence[Logprobs] | None) -> list[tuple[Any, ...]] | None:
    return None if logprobs is None else [(each.chosen, each.top) for each in logprobs]


def unpack_logprobs(fields: Sequence[tuple[Any, ...]] | None) -> list[Logprobs] | None:
    return None if fields is None else [Logprobs(*each) for each in fields]


def _unpack_answer(fields: Any, prompt_ids: Sequence[int], bounds: ModelBounds) -> Request:
    _check(isinstance(fields, tuple) and len(fields) == 3, "answer")
    request_id, sampling, token_ids = fields
    _check(_is_request_id(request_id), "id")
    _check(_are_ids(token_ids, bounds), "tokens")
    request = Request(request_id, [*prompt_ids, *token_ids], len(prompt_ids), unpack_sampling(sampling, bounds))
    request.prompt_outputs_sent = request.num_new_tokens > 0
    has_ended = request.num_new_tokens >= max(request.sampling.max_new_tokens, 1)
    _check(not has_ended, "tokens: the answer has ended")
    _check(request.max_len <= bounds.max_len, "length")
    return request


def _is_request_id(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_REQUEST_ID_LEN


def _are_ids(value: Any, bounds: ModelBounds) -> bool:
    if not isinstance(value, tuple) or not value:
        return value == ()
    return set(map(type, value)) == {int} and min(value) >= 0 and max(value) < bounds.vocab_size  # in C


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"a message with a wrong {what}")
