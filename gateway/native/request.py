"""Translation of native request bodies to the model's requests, which are almost the same.

The module also decides whether a body is native or OpenAI's.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from engine import wire
from engine.errors import InvalidRequest
from gateway.native.answer import NativeExchange
from gateway.openai.request import CHECKS, FORWARDED_FIELDS, PROMPT_OUTPUT_FIELDS
from gateway.protocol import RequestContext

SHARED_FIELDS = {
    *FORWARDED_FIELDS,
    *PROMPT_OUTPUT_FIELDS,
    "text",
    "input_ids",
    "messages",
    "max_tokens",
    "logprobs",
    "n",
    "stream",
    "timeout",
    "model",
}
NATIVE_ONLY = frozenset(CHECKS) - SHARED_FIELDS
ALIASED = {name: (name, *field.aliases) for name, field in wire.FIELDS.items() if field.aliases}


def is_native(body: dict[str, Any]) -> bool:
    """Return True if `body` is a native request.

    That is the case with `text` or `input_ids`, or with `messages` and a field that only the native protocol has
    (`req_id`, `max_dec_len`, `topp`, ...). `timeout` is such a field if `model`, which OpenAI's clients always send, is
    absent.
    """
    given = {key for key, value in body.items() if value is not None}
    if given & {"text", "input_ids"}:
        return True
    return "prompt" not in given and bool(given & NATIVE_ONLY or ("timeout" in given and "model" not in given))


def parse(body: dict[str, Any], context: RequestContext) -> NativeExchange:
    """Return the exchange.

    Raise InvalidRequest for the fields that are used in the gateway, by the same rules as the model.
    """
    received = str(time.time())
    body = {key: value for key, value in body.items() if key not in wire.CONTROL_KEYS}
    if body.get("req_id") is None:
        body["req_id"] = context.given_id or str(uuid.uuid4())
    else:
        context.given_id = ""  # the client is responsible for a unique id
    context.req_id = wire.req_id_of(body)  # None unless it is a valid id: the value may be any JSON
    return NativeExchange(
        requests=[body],
        stream=_checked(body, "stream") or False,
        timeout_s=_checked(body, "timeout"),
        return_usage=_checked(body, "return_usage") or False,
        received=received if body.get("benchmark") else None,
        names=names_in(body),
        unenforced=_unenforced(body.get("response_format")),
    )


def names_in(body: dict[str, Any]) -> dict[str, str]:
    """Return the names by which the client has called the fields that have several, for error messages."""
    given = {name: [key for key in keys if body.get(key) is not None] for name, keys in ALIASED.items()}
    return {name: keys[0] for name, keys in given.items() if keys}


def _unenforced(response_format: Any) -> tuple[str, ...]:
    """Return what of a schema is not enforced. The model refuses what is wrong with it."""
    try:
        checked = (
            None
            if response_format is None
            else wire.STRUCTURED_OUTPUT_FIELDS["response_format"]("response_format", response_format)
        )
    except InvalidRequest:
        return ()
    return checked.unenforced if checked else ()


def _checked(body: dict[str, Any], name: str) -> Any:
    value = body.get(name)
    return None if value is None else wire.FIELDS[name].check(name, value)
