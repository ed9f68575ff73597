"""Numeric bounds of JSON schemas. llguidance reads them as 64-bit floats, so only integers up to 2^53 are exact."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

from engine.wire.checks import refusal

Json = dict[str, Any]
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Code generators write them for int64 and uint64, so they are no real bounds.
LIMITS_OF_TYPES = (-(2**63), 2**63 - 1, 2**64 - 1)
MAX_EXACT = 2**53
LITERALS = ("const", "enum", "default", "examples")  # contain values, no schemas
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
JSON_IN_LARK = re.compile(r"%json\s*(?=\{)")


def with_exact_bounds(key: str, schema: Json) -> Json:
    """Return `schema` without the bounds that only name the range of a 64-bit integer. Raise InvalidRequest for another
    bound beyond 2^53."""
    schema = copy.deepcopy(schema)
    for part in _objects(schema):
        for name in BOUNDS:
            bound = part.get(name)
            if isinstance(bound, bool) or not isinstance(bound, (int, float)):
                continue
            if bound in LIMITS_OF_TYPES:
                del part[name]
            elif abs(bound) > MAX_EXACT:
                text = f"sets `{name}` to {{value}}; bounds beyond +-{{limit}} cannot be enforced exactly"
                raise refusal(key, text, str(bound)[:40], MAX_EXACT)
    return schema


def with_exact_bounds_in_lark(key: str, grammar: str) -> str:
    """Apply `with_exact_bounds` to every `%json {...}` of a Lark grammar and return the grammar."""
    parts, position = [], 0
    for match in JSON_IN_LARK.finditer(grammar):
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, match.end())
        except (ValueError, RecursionError):  # llguidance reports the error
            continue
        if match.start() >= position and (exact := with_exact_bounds(key, schema)) != schema:
            parts += [grammar[position : match.end()], json.dumps(exact, ensure_ascii=False)]
            position = end
    return "".join([*parts, grammar[position:]])


def _objects(schema: Json) -> Iterator[Json]:
    """Yield `schema` and all objects in it that may be schemas: a `$ref` may point anywhere."""
    found: list[tuple[Any, bool]] = [(schema, False)]
    while found:
        value, is_by_name = found.pop()
        if isinstance(value, list):
            found += [(item, False) for item in value]
        elif isinstance(value, dict):
            if not is_by_name:
                yield value
            names = [name for name in value if is_by_name or name not in LITERALS]
            found += [(value[name], name in BY_NAME and not is_by_name) for name in names]
