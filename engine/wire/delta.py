"""An answer as it grows: what it has gained, its tokens, their log-probabilities, what its prompt has to tell. msgspec
structs and named tuples, which travel as msgpack arrays; `fields` are their JSON."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

UNLIKELY = -9999.0  # in JSON, which has no infinity; OpenAI writes the same
REASONING_BEGIN, REASONING_END = "<think>", "</think>"  # around what models think before they answer
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
        return {"token_id": self.token_id, "token": self.token, "bytes": self.bytes, "logprob": self.logprob}


class PromptDetails(NamedTuple):
    """What was asked of the prompt itself; None: it was not."""

    token_ids: list[int] | None = None
    text: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None

    def fields(self) -> dict[str, Any]:
        logprobs = self.logprobs and [each.fields() for each in self.logprobs]
        values = zip(PROMPT_DETAIL_NAMES, (self.token_ids, self.text, logprobs), strict=True)
        return {name: value for name, value in values if value is not None}


PROMPT_DETAIL_NAMES = ("prompt_token_ids", "prompt_text", "prompt_logprobs")


class Delta(msgspec.Struct, frozen=True, tag="delta", array_like=True):
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
    prompt_details: PromptDetails | None = None  # with the first of each answer
    reasoning: str | None = None  # the same: it "never" begins with one, "may", or "does" whether it says so or not
    max_dec_len: int | None = None  # the same: what the request's was reduced to (`cut_max_dec_len`)

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
        if self.prompt_details is not None:
            fields |= self.prompt_details.fields()
        if self.reasoning is not None:
            fields["thought"] = self.reasoning
        if self.max_dec_len is not None:
            fields["max_dec_len"] = self.max_dec_len
        return fields


class Final(Delta, frozen=True, tag="final", array_like=True, kw_only=True):
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


def likely(logprob: float) -> float:
    """Return the log-probability as JSON can have it: a number that is not less than UNLIKELY."""
    return max(UNLIKELY, logprob)  # not NaN either, in this order
