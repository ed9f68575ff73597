"""What the model answers, as values, and their JSON: a list with one object, and a bare object for a failure.

`write_answer` is for the model's side, `read_answer` for who asked. Field names are the predecessor's where it had
them. Nothing here knows tokenizers, Triton or HTTP.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from engine.errors import RequestError, error_of
from engine.wire.loras import Loras
from engine.wire.tokens import Detokenized, Tokenized

UNLIKELY = -9999.0  # in JSON, which has no infinity; OpenAI writes the same
THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"  # around what models think before they answer
VERSION = "4.6"  # of the predecessor whose error object this is
# Once a token, so they are kept: json.dumps would make an encoder each time, json.loads guess what bytes are.
ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False)
DECODER = json.JSONDecoder()
TIMES = (  # told with `benchmark`
    "preprocess_start_time",
    "preprocess_end_time",
    "schedule_start_time",
    "inference_start_time",
    "inference_current_step_time",
)


class Usage(NamedTuple):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None  # of the prompt; None: not told

    def fields(self) -> dict[str, int]:
        fields = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return fields if self.cached_tokens is None else {**fields, "cached_tokens": self.cached_tokens}


class TokenLogprob(NamedTuple):
    """Of a token of answer or prompt, with the likeliest in its place, or of one of these. There are up to 21 a token,
    and a tuple is made in a quarter of a frozen dataclass's time."""

    token_id: int
    token: str = ""
    bytes: tuple[int, ...] = ()  # of the token: its text may be a part of a character
    logprob: float | None = None  # None: of the first of a prompt, or the engine does not know it (any more)
    top: tuple[TokenLogprob, ...] = ()

    def fields(self) -> dict[str, Any]:
        if self.logprob is None:
            return {"token_id": self.token_id, **({"token": self.token, "bytes": self.bytes} if self.bytes else {})}
        return {**self._own_fields(), "top": [each._own_fields() for each in self.top]}

    def _own_fields(self) -> dict[str, Any]:
        assert self.logprob is not None
        logprob = max(UNLIKELY, self.logprob)  # not NaN either, in this order
        return {"token_id": self.token_id, "token": self.token, "bytes": self.bytes, "logprob": logprob}


class OfPrompt(NamedTuple):
    """What was asked of the prompt itself; None: it was not."""

    token_ids: list[int] | None = None
    text: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None

    def fields(self) -> dict[str, Any]:
        logprobs = self.logprobs and [each.fields() for each in self.logprobs]
        values = zip(OF_PROMPT, (self.token_ids, self.text, logprobs), strict=True)
        return {name: value for name, value in values if value is not None}


OF_PROMPT = ("prompt_token_ids", "prompt_text", "prompt_logprobs")


@dataclass(frozen=True, slots=True)
class Delta:
    """What an answer has gained since the response before it."""

    req_id: str
    token: str  # the text
    token_ids: list[int]
    send_idx: int  # of the first of these tokens in the answer
    usage: Usage
    infer_seed: int
    inference_time_cost: float = 0.0  # seconds since the request was accepted
    return_all_tokens: bool = False
    logprobs: tuple[TokenLogprob, ...] | None = None  # of each token; None: not asked for
    times: dict[str, str] | None = None  # TIMES, when asked for
    index: int = 0  # of the answer among the n to the prompt
    of_prompt: OfPrompt | None = None  # with the first of each answer
    thought: str | None = None  # the same: it "never" begins with one, "may", or "does" whether it says so or not

    @property
    def is_end(self) -> bool:
        """Nothing more comes for the request."""
        return False

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "req_id": self.req_id,
            "index": self.index,
            "is_end": int(self.is_end),
            "token_ids": self.token_ids,
            "token": self.token,
            "send_idx": self.send_idx,
            "usage": self.usage.fields(),
            "inference_time_cost": self.inference_time_cost,
            "infer_seed": self.infer_seed,
            "return_all_tokens": self.return_all_tokens,
            "error_msg": "",
            "error_code": 0,
        }
        if self.logprobs is not None:
            fields["logprobs"] = [each.fields() for each in self.logprobs]
        if self.times is not None:
            fields |= self.times
        if self.of_prompt is not None:
            fields |= self.of_prompt.fields()
        if self.thought is not None:
            fields["thought"] = self.thought
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Final(Delta):
    """The last of an answer, with all of it. Of several answers, one ends the request."""

    finish_reason: str
    stop_reason: str | None = None  # the stop string
    tokens_all: str
    tokens_all_ids: list[int]
    is_end: bool = True
    stop_token: TokenLogprob | None = None  # the id that ended it; None: there is none, or nobody has asked
    embedding: str | None = None  # of the prompt, f32 in base64; None: not asked for

    def fields(self) -> dict[str, Any]:
        more: dict[str, Any] = {} if self.stop_token is None else {"stop_token": self.stop_token.fields()}
        if self.embedding is not None:
            more["embedding"] = self.embedding
        return {
            **Delta.fields(self),
            **more,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "tokens_all": self.tokens_all,
            "tokens_all_ids": self.tokens_all_ids,
            "tokens_all_num": self.usage.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Failure:
    """A refusal, or the end of a request that failed, with all its answers. It has the keys of a delta, for readers
    that expect these; what it counts is of all answers."""

    error: RequestError
    req_id: str | None = None  # None: the request has no valid one
    send_idx: int = 0
    usage: Usage = Usage()
    infer_seed: int | None = None
    is_end: ClassVar[bool] = True

    def fields(self) -> dict[str, Any]:
        return {
            "req_id": self.req_id,
            "index": 0,
            "is_end": 1,
            "token_ids": [],
            "token": "",
            "send_idx": self.send_idx,
            "usage": self.usage.fields(),
            "infer_seed": self.infer_seed,
            "error_msg": str(self.error),
            "error_code": self.error.code,
            "error_type": self.error.kind,
            **{f"error_{name}": value for name, value in self.error.cause.items()},
            **({"retry_after": self.error.retry_after_s} if self.error.retry_after_s else {}),
            "version": VERSION,
            "timestamp": time.time(),
        }


@dataclass(frozen=True, slots=True)
class ModelState:
    """The answer to a probe."""

    ready: bool
    reason: str = ""  # why not
    model_len: int = 0
    max_seq_len: int = 0
    max_dec_len: int = 0
    num_labels: int = 0  # that the model scores prompts by; 0: it has no head for that, and writes answers
    num_running: int = 0
    num_waiting: int = 0
    num_blocks_held: int = 0
    num_open: int = 0
    engine_silent_s: float = 0.0
    engine_step_s: float = 0.0  # for how long the step that runs has
    num_restarts: int = 0
    loras: list[str] | None = None  # the names of adapters
    metrics: list[Any] | None = None  # when asked for: of each sample what gateway/metrics.py writes
    last_requests: list[Any] | None = None  # the same: what has ended, the latest first, without its words
    is_end: ClassVar[bool] = True

    def fields(self) -> dict[str, Any]:
        return {"is_end": 1, **{f.name: getattr(self, f.name) for f in fields(self)}}


@dataclass(frozen=True, slots=True)
class Aborted:
    """The answer to an abort."""

    req_id: str
    aborted: bool  # False: there is no such request of this owner, or no more
    is_end: ClassVar[bool] = True

    def fields(self) -> dict[str, Any]:
        return {"is_end": 1, "req_id": self.req_id, "aborted": self.aborted}


Answer = Delta | Failure | ModelState | Aborted | Tokenized | Detokenized | Loras


def write_answer(answer: Answer) -> bytes:
    if not isinstance(answer, Failure):
        return ENCODER.encode([answer.fields()]).encode()
    fields = answer.fields()
    if answer.error.cause:
        fields["error_template"] = answer.error.text  # for who calls fields otherwise
    # The text may quote what a chat template makes of a lone surrogate.
    return ENCODER.encode(fields).encode(errors="replace")


@dataclass(frozen=True, slots=True)
class Glance:
    index: int
    is_end: bool
    token_ids: list[int]
    infer_seed: int | None


# In the order of `fields`. Within a string no quote stands without a backslash.
GLANCE = re.compile(rb'"index": (\d+), "is_end": (\d), "token_ids": \[([^]]*)\]')
SEED = re.compile(rb'"infer_seed": (\d+)')


def glance_at(response: bytes) -> Glance | None:
    """The tokens of an answer, wherever in the response it begins: in half the time that reading it takes. None
    when there is no answer in it."""
    found = GLANCE.search(response)
    if found is None:
        return None
    index, is_end, token_ids = found.groups()
    ids = list(map(int, token_ids.split(b","))) if token_ids else []
    seed = SEED.search(response, found.end())
    return Glance(int(index), is_end == b"1", ids, int(seed[1]) if seed else None)


def read_answer(payload: bytes) -> Answer:
    body, _ = DECODER.raw_decode(payload.decode())
    if isinstance(body, dict):
        return _failure(body)
    [given] = body
    if "ready" in given:
        return ModelState(**{f.name: given[f.name] for f in fields(ModelState) if f.name in given})
    if "aborted" in given:
        return Aborted(given["req_id"], given["aborted"])
    if "count" in given:
        return Tokenized(given["tokens"], given["max_model_len"], given["token_strs"])
    if "prompt" in given:
        return Detokenized(given["prompt"])
    if "lora_names" in given:
        return Loras(given["lora_names"])
    usage = given["usage"]
    of_all = (
        given["req_id"],
        given["token"],
        given["token_ids"],
        given["send_idx"],
        Usage(usage["prompt_tokens"], usage["completion_tokens"], usage.get("cached_tokens")),
        given["infer_seed"],
        given["inference_time_cost"],
        given["return_all_tokens"],
        tuple(map(_logprob, given["logprobs"])) if "logprobs" in given else None,
        {name: given[name] for name in TIMES} if TIMES[0] in given else None,
        given["index"],
        _of_prompt(given),
        given.get("thought"),
    )
    if "finish_reason" not in given:
        return Delta(*of_all)
    names = ("finish_reason", "stop_reason", "tokens_all", "tokens_all_ids")
    return Final(
        *of_all,
        **{name: given[name] for name in names},
        is_end=bool(given["is_end"]),
        stop_token=_logprob(given["stop_token"]) if "stop_token" in given else None,
        embedding=given.get("embedding"),
    )


def _of_prompt(given: dict[str, Any]) -> OfPrompt | None:
    ids, text, logprobs = map(given.get, OF_PROMPT)
    if ids is logprobs is None:
        return None
    return OfPrompt(ids, text, None if logprobs is None else tuple(map(_logprob, logprobs)))


def _logprob(given: dict[str, Any]) -> TokenLogprob:
    if "logprob" not in given:
        return TokenLogprob(given["token_id"], given.get("token", ""), tuple(given.get("bytes", ())))
    top = tuple(map(_logprob, given["top"])) if given.get("top") else ()
    return TokenLogprob(given["token_id"], given["token"], tuple(given["bytes"]), given["logprob"], top)


def _failure(given: dict[str, Any]) -> Failure:
    cause = {name: given[f"error_{name}"] for name in ("field", "value", "limit") if f"error_{name}" in given}
    text = given["error_template"] if cause else given["error_msg"]
    error = error_of(given["error_type"], text, given.get("retry_after"), **cause)
    return Failure(error, given["req_id"], given["send_idx"], Usage(**given["usage"]), given["infer_seed"])
