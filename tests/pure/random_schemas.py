"""JSON schemas of all the kinds that people write, small ones."""

from __future__ import annotations

import random
from typing import Any

FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
PATTERNS = ("^[a-z]{1,4}$", "^[0-9]{5}$", "^(ab|cd)+$", "^#[0-9a-f]{6}$", "[xyz]")
VALUES = ("a", "b c", "", 'quo"te', "é", 0, -3, 1.5, True, False, None, [1, "x"], {"k": [None]})


def random_schema(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    schema = _schema(rng, 3)
    if seed % 5 == 0:  # by reference, to itself as well
        node = {
            "type": "object",
            "properties": {"v": schema, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
        }
        node |= {"required": ["v", "next"], "additionalProperties": False}
        return {"$defs": {"n": node}, "$ref": "#/$defs/n"}
    return schema


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = [_string, _integer, _number, _fixed, _simple]
    return rng.choice([*leaves, *[_object, _array, _tuple, _union] * depth])(rng, depth - 1)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "format": rng.choice(FORMATS)}
    if kind == 1:
        return (
            {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 12}
            if rng.random() < 0.5
            else {"type": "string", "pattern": rng.choice(PATTERNS[:4])}
        )
    low = rng.randrange(4)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(9)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-200, 200)
    schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 300)}
    if rng.random() < 0.3:
        schema |= {"multipleOf": rng.choice([2, 3, 5]), "maximum": low + 300}
    return schema


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.randrange(1, 99)}


def _fixed(rng: random.Random, depth: int) -> dict[str, Any]:
    values = rng.sample(VALUES, rng.randint(1, 4))
    return {"const": values[0]} if len(values) == 1 else {"enum": values}


def _simple(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["id", "name", "größe", "a b", 'q"', "x-y", "list"], rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _schema(rng, depth) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.7]
    if rng.random() < 0.2:
        schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
    else:
        schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    return {"type": "array", "items": _schema(rng, depth), "minItems": low, "maxItems": low + rng.randrange(4)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [_schema(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth) for _ in range(rng.randint(1, 3))]}
