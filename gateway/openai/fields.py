"""Request fields of OpenAI's protocol as JSON Schema: forwarded ones, and those of request.py."""

from __future__ import annotations

import functools
from typing import Any

from engine.wire import FIELD_DESCRIPTIONS, Check, field_schemas, schema_of
from gateway.openai.request import (
    CHECKS,
    FORWARDED_FIELDS,
    PROMPT_OUTPUT_FIELDS,
    STREAM_OPTIONS,
    check_bool,
    check_name,
    check_num_top,
    check_object,
    check_string,
)

Json = dict[str, Any]
TEXT_SCHEMA: Json = {"type": "string", "minLength": 1}
IDS_SCHEMA = schema_of(CHECKS["input_ids"])
LISTS: list[Json] = [{"type": "array", "items": each, "minItems": 1} for each in (TEXT_SCHEMA, IDS_SCHEMA)]
OPTIONS = {name: {"type": ["boolean", "null"]} for name in STREAM_OPTIONS}


def _field(check: Check, meaning: str, **more: Any) -> Json:
    return {**schema_of(check), "description": meaning, **more}


COMMON_FIELDS: dict[str, Json] = {
    "model": _field(check_name, "any is accepted, and named in the answer"),
    "max_tokens": _field(CHECKS["max_tokens"], "longest answer in tokens"),
    "max_completion_tokens": _field(CHECKS["max_tokens"], "another name of `max_tokens`; this one wins"),
    "n": _field(CHECKS["n"], FIELD_DESCRIPTIONS["n"], default=1),
    "stream": _field(check_bool, "server-sent events that end with `[DONE]` instead of one object", default=False),
    "stream_options": {"type": "object", "properties": OPTIONS, "description": "options of a stream"},
    "structured_outputs": _field(check_object, "vLLM's: one of `json`, `regex`, `choice`, `grammar` and so on"),
    "return_tokens_as_token_ids": _field(check_bool, "in logprobs tokens are named `token_id:1`", default=False),
    "request_id": _field(CHECKS["req_id"], "the `id` of the answer; random if not given"),
    "timeout": _field(CHECKS["timeout"], FIELD_DESCRIPTIONS["timeout"]),
}
CHAT_FIELDS: dict[str, Json] = {
    "messages": _field(CHECKS["messages"], FIELD_DESCRIPTIONS["messages"]),
    "logprobs": _field(check_bool, "logprobs of each token of the answer", default=False),
    "top_logprobs": _field(check_num_top, "with `logprobs`, also those of this many most likely tokens"),
    "tools": {"type": "array", "items": {"type": "object"}, "description": "functions that the model may call"},
    "tool_choice": {"type": ["string", "object"], "description": "`none`, `auto`, `required` or the function to call"},
    "parallel_tool_calls": _field(check_bool, "whether there may be several calls in one answer", default=True),
    "include_reasoning": _field(check_bool, "whether the response contains the model's reasoning", default=True),
    "reasoning_effort": _field(
        check_string, "for the chat template; `none` turns reasoning off if the template supports that"
    ),
    "add_generation_prompt": _field(check_bool, "whether the template writes the beginning of an answer", default=True),
    "enable_thinking": _field(check_bool, "whether the model reasons first, if its chat template can turn that off"),
    "continue_final_message": _field(check_bool, "the answer continues the last message", default=False),
}
COMPLETION_FIELDS: dict[str, Json] = {
    "prompt": {
        "anyOf": [TEXT_SCHEMA, IDS_SCHEMA, *LISTS],
        "description": "a text or a list of token ids, or a list of either; continued as it stands",
    },
    "echo": _field(
        check_bool, "the answer begins with the prompt, and with `logprobs` with those of its tokens", default=False
    ),
    "logprobs": _field(check_num_top, "logprobs of each token and of this many most likely tokens"),
}


@functools.cache
def fields(is_chat: bool) -> dict[str, Json]:
    """Return the fields of a chat or of a completion by name."""
    native, defaults = field_schemas(), {"temperature": {"default": 1}, "top_p": {"default": 1}}  # OpenAI's defaults
    passed_on = {
        name: {**native[name], **defaults.get(name, {})} for name in (*FORWARDED_FIELDS, *PROMPT_OUTPUT_FIELDS)
    }
    for each in passed_on.values():
        each.pop("x-alias-of", None)  # in OpenAI's API the alias is the name
    return {**(CHAT_FIELDS if is_chat else COMPLETION_FIELDS), **COMMON_FIELDS, **passed_on}
