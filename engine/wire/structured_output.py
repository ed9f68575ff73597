"""Structured output of a request: a JSON schema, a regular expression, a grammar and others, checked as far as possible
without compiling a grammar."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from engine.errors import InvalidRequest
from engine.wire.checks import filled_string, json_object, refusal, string
from engine.wire.json_bounds import with_exact_bounds, with_exact_bounds_in_lark
from engine.wire.json_schemas import enforceable_schema
from engine.wire.schema import accepts

MAX_GRAMMAR_BYTES = 128 << 10  # as JSON
MAX_NESTING = 100  # of a schema

Json = dict[str, Any]


class StructuredOutput(NamedTuple):
    """Constraint of an answer."""

    field: str  # request field that contains it
    kind: str  # json, regex, choice, grammar, token_ids, structural_tag
    value: Any
    unenforced: tuple[str, ...] = ()  # ignored keywords of a JSON schema that is not strict


@accepts(type=["object", "string"])
def json_schema(key: str, value: Any, strict: bool = True) -> StructuredOutput:
    """Check a JSON schema, given as an object or a text. Keywords that cannot be enforced are errors if `strict`, else
    they are ignored."""
    schema = object_or_text(key, value)
    check_size(key, schema)
    check_depth(key, schema)
    return StructuredOutput(key, "json", *enforceable_schema(key, with_exact_bounds(key, schema), strict))


def lenient_json_schema(key: str, value: Any) -> StructuredOutput:
    return json_schema(key, value, strict=False)


@accepts(type="string", minLength=1)
def regex(key: str, value: Any) -> StructuredOutput:
    return StructuredOutput(key, "regex", check_size(key, filled_string(key, value)))


@accepts(type="string", minLength=1)
def grammar(key: str, value: Any) -> StructuredOutput:
    return StructuredOutput(key, "grammar", with_exact_bounds_in_lark(key, check_size(key, filled_string(key, value))))


def object_or_text(key: str, value: Any) -> Json:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                "The `{field}` is a text that is no JSON: {value}", field=key, value=str(error)
            ) from None
    return json_object(key, value)


def check_size(key: str, value: Any) -> Any:
    num_bytes = len(string(key, json.dumps(value, ensure_ascii=False)).encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise refusal(key, "has {value} bytes, the limit is {limit}", num_bytes, MAX_GRAMMAR_BYTES)
    return value


def check_depth(key: str, value: Any) -> None:
    if (depth := _depth(value)) > MAX_NESTING:
        raise refusal(key, "is nested {value} deep, the limit is {limit}", depth, MAX_NESTING)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [item for each in level if isinstance(each, (dict, list)) for item in _items(each)]
    return depth


def _items(value: Json | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
