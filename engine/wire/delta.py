"""Responses that carry generated tokens: new tokens and text, log-probabilities, and details of the prompt. They are
msgspec structs and named tuples, encoded as msgpack arrays; `fields` returns their native JSON."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

MIN_LOGPROB = -9999.0  # stands for -inf, which JSON lacks; the same as OpenAI's
REASONING_BEGIN, REASONING_END = "<think>", "</think>"  # delimiters of the reasoning before an answer
TIMES = (  # returned with `benchmark`
    "preprocess_start_time",
    "preprocess_end_time",
    "schedule_start_time",
    "inference_start_time",
    "inference_current_step_time",
)


class Usage(NamedTuple):
    """Token counts of a response."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache; None: unknown
    image_tokens: int = 0  # of the prompt

    def fields(self) -> dict[str, int]:
        fields = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return fields | self.prompt_details()

    def prompt_details(self) -> dict[str, int]:
        """Return what is known of the tokens of the prompt beside their number."""
        cached = {} if self.cached_tokens is None else {"cached_tokens": self.cached_tokens}
        return cached | ({"image_tokens": self.image_tokens} if self.image_tokens else {})


class TokenLogprob(NamedTuple):
    """Log-probability of a token of the answer or prompt, with the most likely alternatives. It is a tuple because up
    to 21 are created per token, in a quarter of the time of a frozen dataclass."""

    token_id: int
    token: str = ""
    bytes: tuple[int, ...] = ()  # UTF-8 of the token, which may be a part of a character
    logprob: float | None = None  # None: first token of a prompt, or unknown after a resume
    top: tuple[TokenLogprob, ...] = ()

    def fields(self) -> dict[str, Any]:
        if self.logprob is None:
            return {"token_id": self.token_id, **({"token": self.token, "bytes": self.bytes} if self.bytes else {})}
        return {**self._own_fields(), "top": [each._own_fields() for each in self.top]}

    def _own_fields(self) -> dict[str, Any]:
        return {"token_id": self.token_id, "token": self.token, "bytes": self.bytes, "logprob": self.logprob}


class PromptDetails(NamedTuple):
    """Token ids, text and log-probabilities of the prompt, as far as they are requested."""

    token_ids: list[int] | None = None
    text: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None

    def fields(self) -> dict[str, Any]:
        logprobs = self.logprobs and [each.fields() for each in self.logprobs]
        values = zip(PROMPT_DETAIL_NAMES, (self.token_ids, self.text, logprobs), strict=True)
        return {name: value for name, value in values if value is not None}


PROMPT_DETAIL_NAMES = ("prompt_token_ids", "prompt_text", "prompt_logprobs")


class Delta(msgspec.Struct, frozen=True, tag="delta", array_like=True):
    """Tokens and text of a choice since its previous response."""

    req_id: str
    token: str  # the text
    token_ids: list[int]
    send_idx: int  # index of the first of these tokens in the answer
    usage: Usage
    infer_seed: int
    inference_time_cost: float = 0.0  # seconds since the request was accepted
    return_all_tokens: bool = False
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token; None: not requested
    times: dict[str, str] | None = None  # TIMES, if requested
    index: int = 0  # of the choice
    prompt_details: PromptDetails | None = None  # in the first response of each choice
    reasoning: str | None = None  # in the first response: see `Config.reasoning`
    max_dec_len: int | None = None  # in the first response: the limit after a reduction (`cut_max_dec_len`)
    text_idx: int = 0  # position of `token` in the text of the answer, in characters

    @property
    def is_end(self) -> bool:
        """Return whether this is the last response of the request."""
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
    """Last response of a choice, with its whole text. One of several choices has `is_end` and ends the request."""

    finish_reason: str
    stop_reason: str | int | None = None  # the stop string, or a stop id of the request
    tokens_all: str
    tokens_all_ids: list[int]
    is_end: bool = True
    stop_token: TokenLogprob | None = None  # the token that ended the answer, if there is one and it is requested
    embedding: str | None = None  # embedding or scores of the prompt, f32 in base64; None: not requested

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


def finite_logprob(logprob: float) -> float:
    """Return the log-probability as a finite number for JSON, at least MIN_LOGPROB."""
    return max(MIN_LOGPROB, logprob)  # in this order NaN becomes MIN_LOGPROB, too
