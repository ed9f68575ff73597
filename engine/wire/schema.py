"""JSON Schema of each check of a request field, for the gateway's OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Json = dict[str, Any]
Check = Callable[[str, Any], Any]  # (the key the client used, its value) -> the value; raises InvalidRequest
Checks = TypeVar("Checks", bound=Check)

ID: Json = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}  # token id
IDS: Json = {"type": "array", "items": ID}
TEXT_PART = {"properties": {"type": {"const": "text"}, "text": {"type": "string"}}, "required": ["type", "text"]}
URL = {"type": "string", "pattern": "^([dD][aA][tT][aA]:|[hH][tT][tT][pP][sS]?://)[\\x00-\\x7f]*$"}
IMAGE_URL = {
    "anyOf": [
        URL,
        {
            "type": "object",
            "properties": {"url": URL, "detail": {"enum": ["auto", "low", "high", None]}},
            "required": ["url"],
        },
    ]
}
IMAGE_PART = {
    "properties": {"type": {"const": "image_url"}, "image_url": IMAGE_URL},
    "required": ["type", "image_url"],
}
PART = {"type": "object", "anyOf": [TEXT_PART, IMAGE_PART]}
CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": PART}]}
MESSAGE: Json = {
    "type": "object",
    "properties": {"role": {"type": "string", "minLength": 1}, "content": CONTENT},
    "required": ["content"],
}


def accepts(**schema: Any) -> Callable[[Checks], Checks]:
    """Attach the JSON Schema of the accepted values to a check. The check may accept more values than documented."""

    def with_schema(check: Checks) -> Checks:
        check.schema = schema  # type: ignore[attr-defined]
        return check

    return with_schema


def schema_of(check: Check) -> Json:
    """Return the JSON Schema of a check; empty, which accepts anything, if it has none."""
    return getattr(check, "schema", {})
