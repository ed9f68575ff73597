"""The form that an answer must have, as a request asks for it: a JSON schema, a regular expression, a grammar. What of
it can be seen without compiling is checked here, its size too."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from engine.errors import InvalidRequest
from engine.wire.checks import filled_string, json_object, refusal, string
from engine.wire.json_bounds import with_exact_bounds, with_exact_bounds_in_lark
from engine.wire.json_schemas import to_follow
from engine.wire.schema import holds

MAX_GRAMMAR_BYTES = 128 << 10  # as JSON
MAX_NESTING = 100  # of a schema

Json = dict[str, Any]


class StructuredOutput(NamedTuple):
    field: str  # that asks for it
    kind: str  # json, regex, choice, grammar, token_ids, structural_tag
    value: Any
    unenforced: tuple[str, ...] = ()  # what of a schema is left out, as its client allows


@holds(type=["object", "string"])
def json_schema(key: str, value: Any, strict: bool = True) -> StructuredOutput:
    """Unless it is `strict`, keywords that cannot be enforced are left out."""
    schema = object_or_text(key, value)
    check_size(key, schema)
    check_depth(key, schema)
    return StructuredOutput(key, "json", *to_follow(key, with_exact_bounds(key, schema), strict))


def lenient_json_schema(key: str, value: Any) -> StructuredOutput:
    return json_schema(key, value, strict=False)


@holds(type="string", minLength=1)
def regex(key: str, value: Any) -> StructuredOutput:
    return StructuredOutput(key, "regex", check_size(key, filled_string(key, value)))


@holds(type="string", minLength=1)
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
