"""What an answer is made by, of the JSON schema that a client gives. Objects have the properties that are named, and no
others: a schema that says nothing of those allows them, and small models go on inventing some; vLLM, llama.cpp and
Outlines do the same. A format that the standard does not know (`int32`, `password`, `path`) is a note."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
OF_ONE = ("items", "additionalProperties")
OF_LIST = ("prefixItems", "anyOf", "oneOf", "allOf")
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
# They speak of properties of the same object that are named elsewhere, always or beside some: nothing is closed then.
COMBINING = ("not", "if", "dependentSchemas", "dependencies", "dependentRequired", "$dynamicRef")
COMBINING_BESIDE = ("allOf", "anyOf", "oneOf", "$ref", "minProperties")
FORMATS = (
    "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference "
    "uri-template uuid json-pointer relative-json-pointer regex"
).split()


def to_follow(schema: Json) -> Json:
    """Whatever it allows the schema allows, too."""
    schema = copy.deepcopy(schema)
    parts = list(_within(schema))
    for part in parts:
        if "format" in part and part["format"] not in FORMATS:
            del part["format"]
    if any(map(_combines, parts)):
        return schema
    for part in parts:
        names, required = part.get("properties"), part.get("required", [])
        if isinstance(names, dict) and isinstance(required, list) and all(f"{each}" in names for each in required):
            part.setdefault("additionalProperties", False)
    return schema


def _combines(schema: Json) -> bool:
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    beside = COMBINING_BESIDE if "properties" in schema else ()
    return several or any(name in schema for name in (*COMBINING, *beside))


def _within(schema: Any) -> Iterator[Json]:
    """It, and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name, value in schema.items():
        parts = [value] if name in OF_ONE else value if name in OF_LIST else ()
        if name in OF_NAMES and isinstance(value, dict):
            parts = value.values()
        for part in parts if isinstance(value, (dict, list)) else ():
            yield from _within(part)
