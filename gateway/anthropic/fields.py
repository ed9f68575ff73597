"""Request fields of Anthropic's messages as JSON Schema."""

from __future__ import annotations

import functools
from typing import Any

from gateway.openai.fields import fields as fields_of_chat
from gateway.openai.request import FORWARDED_FIELDS
from gateway.openai.unsupported_fields import UNSUPPORTED_IN_BLOCKS

Json = dict[str, Any]
OBJECTS: Json = {"type": "array", "items": {"type": "object"}}
RENAMED_CHAT_FIELDS = {"stop", "response_format", "reasoning_max_tokens", "thinking_token_budget"}
# As in a chat; OpenAI's own names for what Anthropic calls otherwise do not act here.
SHARED_CHAT_FIELDS = {"model", "stream", "max_tokens", "request_id", "timeout", "structured_outputs"}
CHAT_FIELDS = tuple({*FORWARDED_FIELDS, *SHARED_CHAT_FIELDS} - RENAMED_CHAT_FIELDS - {*UNSUPPORTED_IN_BLOCKS})
OWN_FIELDS: dict[str, Json] = {
    "messages": {
        **OBJECTS,
        "minItems": 1,
        "description": "turns of `user` and `assistant`; the answer goes on with the "
        "last one if that is the assistant's",
    },
    "system": {"anyOf": [{"type": "string"}, OBJECTS], "description": "the system prompt"},
    "stop_sequences": {
        "type": "array",
        "items": {"type": "string"},
        "description": "the answer ends before one of them",
    },
    "tools": {**OBJECTS, "description": "functions that the model may call: `name`, `description`, `input_schema`"},
    "tool_choice": {"type": "object", "description": "`type`: `auto`, `any`, `none`, or `tool` with its `name`"},
    "thinking": {"type": "object", "description": "`type`: `enabled`, `adaptive` or `disabled` (the default)"},
    "output_config": {"type": "object", "description": "`format`: a `json_schema` with its `schema`; `effort`"},
    "output_format": {"type": "object", "description": "an older name of the `format` in `output_config`"},
}
# field -> values that are accepted because they ask for the default; null, false and empty values always are
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("container", "mcp_servers", "context_management", "thread", "compaction"), ())
}


@functools.cache
def fields() -> dict[str, Json]:
    """Return the fields by name."""
    of_chat = fields_of_chat(True)
    return {**OWN_FIELDS, **{name: of_chat[name] for name in of_chat if name in CHAT_FIELDS}}
