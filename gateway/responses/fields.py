"""Request fields of OpenAI's Responses API as JSON Schema."""

from __future__ import annotations

import functools
from typing import Any

from gateway.openai.fields import fields as fields_of_chat
from gateway.openai.request import FORWARDED_FIELDS
from gateway.openai.unsupported_fields import UNSUPPORTED_IN_BLOCKS

Json = dict[str, Any]
INCLUDED = (  # accepted because such items never occur
    *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "code_interpreter_call.outputs"),
    *("computer_call_output.output.image_url", "message.input_image.image_url"),
)
OBJECTS: Json = {"type": "array", "items": {"type": "object"}}
SHARED_CHAT_FIELDS = {
    *("model", "stream", "tools", "parallel_tool_calls", "request_id", "timeout"),
    *("structured_outputs", "include_reasoning"),
}
CHAT_FIELDS = tuple({*FORWARDED_FIELDS, *SHARED_CHAT_FIELDS} - {*UNSUPPORTED_IN_BLOCKS, "response_format"})
OWN_FIELDS: dict[str, Json] = {
    "input": {
        "anyOf": [{"type": "string", "minLength": 1}, OBJECTS],
        "description": "a text, or the conversation so far",
    },
    "instructions": {"type": "string", "description": "a system message before the others"},
    "max_output_tokens": {"type": "integer", "minimum": 1, "description": "longest answer in tokens"},
    "text": {"type": "object", "description": "`format`: the form of the answer, as `response_format` in a chat"},
    "reasoning": {"type": "object", "description": "`effort`, as `reasoning_effort` in a chat"},
    "tool_choice": {"type": ["string", "object"], "description": "`none`, `auto`, `required` or the function to call"},
    "metadata": {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "description": "repeated in the response",
    },
    "store": {"type": "boolean", "description": "the response can be retrieved and continued"},
    "background": {"type": "boolean", "description": "the same, and the response goes on without its client"},
    "previous_response_id": {"type": "string", "description": "a stored response that `input` continues"},
}
# field -> values that are accepted because they ask for the default; null, false and empty values always are
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("conversation", "prompt"), ()),
    **dict.fromkeys(("context_management", "moderation"), ()),
    **dict.fromkeys(("previous_response", "previous_input_messages", "enable_response_messages"), ()),
    "truncation": ("disabled",),
}


@functools.cache
def fields() -> dict[str, Json]:
    """Return the fields by name."""
    of_chat = fields_of_chat(True)
    return {**OWN_FIELDS, **{name: each for name, each in of_chat.items() if name in CHAT_FIELDS}}
