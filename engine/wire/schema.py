"""Beside each check of a field: the same as JSON Schema, for the document that the gateway serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Json = dict[str, Any]
Check = Callable[[str, Any], Any]  # (the key the client used, its value) -> the value; raises InvalidRequest
Checks = TypeVar("Checks", bound=Check)

ID: Json = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}  # of a token
IDS: Json = {"type": "array", "items": ID}
TEXT_PART = {"properties": {"type": {"const": "text"}, "text": {"type": "string"}}, "required": ["type", "text"]}
CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object", **TEXT_PART}}]}
MESSAGE: Json = {
    "type": "object",
    "properties": {"role": {"type": "string", "minLength": 1}, "content": CONTENT},
    "required": ["content"],
}


def holds(**schema: Any) -> Callable[[Checks], Checks]:
    """What the check takes, as far as JSON Schema can say it. It may take more, which nobody is told to send."""

    def with_schema(check: Checks) -> Checks:
        check.schema = schema  # type: ignore[attr-defined]
        return check

    return with_schema


def schema_of(check: Check) -> Json:
    """Empty, which takes anything, where nothing is said."""
    return getattr(check, "schema", {})
