"""The fields of a request: their names, and what each may hold. Every check names the key the client used, the value
and the limit."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from engine.errors import InvalidRequest

MAX_STOP_SEQUENCES = 64  # and bad words
MAX_STOP_LEN = 1024  # characters
MAX_TOKEN_IDS = 1024  # to stop at, banned, or with a bias
MAX_MESSAGES = 10_000  # each costs the checks and the chat template some microseconds, however short it is
MAX_LOGPROBS = 20
MAX_REQ_ID_LEN = 256
TOKEN_ID = re.compile("[0-9]{1,10}")

Check = Callable[[str, Any], Any]  # (the key the client used, its value) -> the value; raises InvalidRequest


def shown(value: Any) -> str:
    """A client's value for an error message: escaped and short."""
    try:
        text = json.dumps(value, ensure_ascii=True, default=str)
    except RecursionError:
        return "deeply nested"
    return text if len(text) <= 80 else f"{text[:77]}..."


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) and abs(value) < 2**63) or (isinstance(value, float) and math.isfinite(value))


def _string(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"The `{key}` in input parameters must be a string, it is {kind_of(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"The `{key}` in input parameters must be valid Unicode, it has a lone surrogate"
        ) from None
    return value


def _filled_string(key: str, value: Any) -> str:
    if not _string(key, value):
        raise InvalidRequest(f"The `{key}` in input parameters cannot be empty")
    return value


def _req_id(key: str, value: Any) -> str:
    text = _filled_string(key, str(value) if _is_int(value) else value)
    if len(text) > MAX_REQ_ID_LEN:
        raise InvalidRequest(f"The `{key}` has {len(text)} characters, the limit is {MAX_REQ_ID_LEN}")
    return text


def _bool(key: str, value: Any) -> bool:
    if not isinstance(value, bool) and value not in (0, 1):
        raise InvalidRequest(f"The `{key}` must be a boolean, it is {shown(value)}")
    return bool(value)


def _positive_int(key: str, value: Any) -> int:
    if not _is_int(value) or value < 1:
        raise InvalidRequest(f"The `{key}` must be an integer and greater than 0, it is {shown(value)}")
    return value


def _int_in(low: int, high: int) -> Check:
    def check(key: str, value: Any) -> int:
        if not _is_int(value) or not low <= value <= high:
            raise InvalidRequest(f"The `{key}` must be an integer in [{low}, {high}], it is {shown(value)}")
        return value

    return check


def _number_in(low: float, high: float) -> Check:
    def check(key: str, value: Any) -> float:
        if not _is_number(value) or not low <= value <= high:
            raise InvalidRequest(f"The `{key}` must be in [{low:g}, {high:g}], it is {shown(value)}")
        return float(value)

    return check


def _temperature(key: str, value: Any) -> float:
    if not _is_number(value) or not 0 <= value <= 100:
        raise InvalidRequest(f"The `{key}` must be >= 0 and at most 100, it is {shown(value)}")
    return float(value)


def _penalty(key: str, value: Any) -> float:
    if not _is_number(value) or not 0.01 <= value <= 10:  # below, it is 0 for some device
        raise InvalidRequest(f"The `{key}` must be greater than 0 (at least 0.01) and at most 10, it is {shown(value)}")
    return float(value)


def _top_k(key: str, value: Any) -> int:
    if not _is_int(value) or value < -1:
        raise InvalidRequest(f"The `{key}` must be an integer, -1 or 0 for all tokens, it is {shown(value)}")
    return min(max(value, 0), 2**31 - 1)


def _logprobs(key: str, value: Any) -> int:
    if isinstance(value, bool):
        return 0 if value else -1
    return _int_in(-1, MAX_LOGPROBS)(key, value)


def _token_ids(key: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise InvalidRequest(f"The `{key}` in input parameters must be a list, it is {kind_of(value)}")
    if not value:
        raise InvalidRequest(f"The `{key}` in input parameters cannot be empty")
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 2**31:  # in C: half the time of a loop
        wrong = next(item for item in value if not _is_int(item) or not 0 <= item < 2**31)
        raise InvalidRequest(f"The `{key}` must hold token ids, {shown(wrong)} is none")
    return value


def _few_token_ids(key: str, value: Any) -> tuple[int, ...]:
    """Every one of them costs time in every step."""
    if value == []:
        return ()
    token_ids = tuple(_token_ids(key, [value] if _is_int(value) else value))
    return _at_most(MAX_TOKEN_IDS, key, token_ids)


def _at_most(limit: int, key: str, items: Any) -> Any:
    if len(items) > limit:
        raise InvalidRequest(f"The `{key}` has {len(items)} items, the limit is {limit}")
    return items


def _strings(key: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise InvalidRequest(f"The `{key}` must be a string or a list of strings, it is {kind_of(value)}")
    return tuple(_short_string(key, item) for item in _at_most(MAX_STOP_SEQUENCES, key, items))


def _short_string(key: str, value: Any) -> str:
    text = _filled_string(key, value)
    if len(text) > MAX_STOP_LEN:
        raise InvalidRequest(f"The `{key}` has an item of {len(text)} characters, the limit is {MAX_STOP_LEN}")
    return text


def _messages(key: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise InvalidRequest(f"The `{key}` in input parameters must be a list, it is {kind_of(value)}")
    if not value:
        raise InvalidRequest(f"The `{key}` in input parameters cannot be empty")
    for item in _at_most(MAX_MESSAGES, key, value):
        if not isinstance(item, dict):
            raise InvalidRequest(f"The items in {key} must be objects, {shown(item)} is {kind_of(item)}")
        if item.get("content") is None and not item.get("tool_calls"):
            raise InvalidRequest(f"The item in {key} must include `content`")
        _filled_string(f"{key}[].role", item.get("role", "user"))
        _content(f"{key}[].content", item.get("content", ""))
    return [{"role": "user", **item} for item in value]


def _content(key: str, value: Any) -> None:
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise InvalidRequest(f"The `{key}` may hold parts of type `text` only, {shown(part)} is none")
            _string(f"{key}[].text", part.get("text"))
    elif value is not None:
        _string(key, value)


def _logit_bias(key: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"The `{key}` must be an object of token id and bias, it is {kind_of(value)}")
    for token_id, bias in _at_most(MAX_TOKEN_IDS, key, value).items():
        if not TOKEN_ID.fullmatch(token_id) or int(token_id) >= 2**31:
            raise InvalidRequest(f"The `{key}` must have token ids as keys, {shown(token_id)} is none")
        _number_in(-100, 100)(f"{key}.{token_id}", bias)
    return tuple((int(token_id), float(bias)) for token_id, bias in value.items())


def _object(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"The `{key}` must be an object, it is {kind_of(value)}")
    return value


def _response_type(key: str, value: Any) -> str:
    if value not in ("fastdeploy", "openai"):
        raise InvalidRequest(f"The `{key}` must be either `fastdeploy` or `openai`.")
    return value


def _anything(key: str, value: Any) -> Any:
    return value


class Field(NamedTuple):
    aliases: tuple[str, ...]  # other names of it, the first present wins; the last is OpenAI's
    check: Check


FIELDS: dict[str, Field] = {
    "req_id": Field((), _req_id),
    "text": Field((), _filled_string),
    "input_ids": Field((), _token_ids),
    "messages": Field((), _messages),
    "system": Field((), _string),
    "apply_chat_template": Field((), _bool),
    "chat_template_kwargs": Field((), _object),
    "max_dec_len": Field(("seq_len", "max_tokens"), _positive_int),
    "min_dec_len": Field(("min_tokens",), _positive_int),
    "topp": Field(("top_p",), _number_in(0, 1)),
    "top_k": Field((), _top_k),
    "min_p": Field((), _number_in(0, 1)),
    "temperature": Field((), _temperature),
    "penalty_score": Field(("repetition_penalty",), _penalty),
    "frequency_score": Field(("frequency_penalty",), _number_in(-2, 2)),
    "presence_score": Field(("presence_penalty",), _number_in(-2, 2)),
    "infer_seed": Field(("seed",), _int_in(-(2**63), 2**64 - 1)),
    "eos_token_ids": Field(("stop_token_ids",), _few_token_ids),
    "ignore_eos": Field((), _bool),
    "stop_sequences": Field(("stop",), _strings),
    "include_stop_str_in_output": Field((), _bool),
    "skip_special_tokens": Field((), _bool),
    "bad_words": Field((), _strings),
    "bad_words_token_ids": Field((), _few_token_ids),
    "logit_bias": Field((), _logit_bias),
    "logprobs": Field((), _logprobs),
    "return_all_tokens": Field((), _bool),
    "benchmark": Field((), _bool),
    "stream": Field((), _bool),
    "return_usage": Field((), _bool),
    "response_type": Field((), _response_type),
    "timeout": Field((), _number_in(0, 1e9)),
    "response_timeout": Field((), _number_in(0, 1e9)),
    "enable_text_truncate": Field((), _bool),  # a prompt is never cut: too long is an error
    "model": Field((), _anything),
}
