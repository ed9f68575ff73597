"""JSON schemas of small values in which every keyword occurs, also where it says nothing or contradicts another."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("a", "b", "c")
Json = dict[str, Any]
NUMBERS = {"minimum": [-3, 0, 3], "maximum": [-1, 2, 5], "exclusiveMinimum": [-1, 1], "multipleOf": [2]}
TEXTS = {"minLength": [1, 2], "maxLength": [1, 3], "pattern": ["^a", "b$", "^(?!a)"], "format": ["date", "iri", "note"]}
LISTS = {"minItems": [1, 2], "maxItems": [1, 2], "uniqueItems": [True, False], "minContains": [0, 1]}
OBJECTS = {
    **{"additionalProperties": [False, True, {"type": "integer"}], "unevaluatedProperties": [False]},
    **{"minProperties": [1, 2], "maxProperties": [1, 2], "required": [["a"], ["a", "b"], ["c"]]},
    **{"propertyNames": [{"enum": ["a", "x"]}, {"pattern": "^a"}, {"maxLength": 1}, True]},
    **{"dependentRequired": [{"a": ["b"]}, {"b": ["c"]}], "dependencies": [{"a": ["c"]}]},
}
OF_SCHEMAS = {
    **{"items": "array", "contains": "array", "properties": "object", "dependentSchemas": "object"},
    **{"patternProperties": "object", "not": "", "if": "", "then": "", "anyOf": "", "allOf": "", "oneOf": ""},
}
MAPS = {"properties": NAMES, "dependentSchemas": NAMES, "patternProperties": ("^x",)}


def random_keywords(seed: int) -> Json:
    rng = random.Random(seed)
    kind = rng.randrange(4)
    if kind == 0:  # alternatives by reference
        named = {name: _schema(rng, 1) for name in "AB"}
        return {"$defs": named, "oneOf": [{"$ref": f"#/$defs/{name}"} for name in named]}
    if kind == 1:  # distinguished by a property, or not
        return {"oneOf": [_with_tag(rng, value) for value in ("p", "q", rng.choice("pr"))[: rng.randint(2, 3)]]}
    return _schema(rng, 2)


def _with_tag(rng: random.Random, value: str) -> Json:
    properties = {"k": {"const": value}, "b": _schema(rng, 0)}
    schema = {"type": "object", "properties": properties}
    return schema | ({"required": ["k"]} if rng.random() < 0.6 else {})


def _schema(rng: random.Random, depth: int) -> Json:
    types = ["integer", "number", "string", "boolean", "null", ["integer", "null"], *["object"] * 4, "array"]
    kind = rng.choice([*types, None])
    schema: Json = {} if kind is None else {"type": kind}
    if rng.random() < 0.15:
        schema["enum"] = [rng.choice([None, True, 1, 1.0, 2.5, "a", "ab", [], {"a": 1}]) for _ in range(2)]
    for of, keywords in (("number", NUMBERS), ("string", TEXTS), ("array", LISTS), ("object", OBJECTS)):
        if kind in (of, None) or (of == "number" and kind == "integer"):
            schema |= {name: rng.choice(values) for name, values in keywords.items() if rng.random() < 0.15}
    for name, of in OF_SCHEMAS.items():
        likely = 0.6 if name in ("properties", "items") else 0.3 if name == "oneOf" else 0.06
        if depth and of in ("", kind) and rng.random() < likely:
            schema[name] = _of_schemas(rng, name, depth - 1)
    return schema


def _of_schemas(rng: random.Random, name: str, depth: int) -> Any:
    if name in MAPS:
        return {key: _schema(rng, depth) for key in MAPS[name] if rng.random() < 0.7}
    if name.endswith("Of"):
        return [_schema(rng, depth) for _ in range(rng.randint(1, 3))]
    return _schema(rng, depth)
