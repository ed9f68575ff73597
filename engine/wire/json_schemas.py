"""Conversion of a client's JSON schema to one that llguidance enforces. Every value of the result is valid for the
client's schema.

Objects get no properties beyond the named ones unless the schema allows them explicitly: JSON Schema allows them by
default, and small models would invent properties without end; vLLM, llama.cpp and Outlines do the same. Keywords that
cannot be enforced are refused with their place, or ignored if the client allows it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from engine.wire.checks import refusal
from engine.wire.json_disjoint import DisjointnessChecker, SchemaView
from engine.wire.json_keywords import SchemaRewriter
from engine.wire.json_subschemas import Json, listed, reachable, resolved, texts_in

OF_ONE = ("items", "additionalProperties")
OF_LIST = ("prefixItems", "anyOf", "oneOf", "allOf")
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
# They refer to properties that are named elsewhere for the same object, so that objects cannot be closed.
COMBINING_BESIDE = ("allOf", "anyOf", "oneOf", "$ref", "minProperties")
MAX_STEPS = 10_000  # of the proofs for one schema
MAX_CANDIDATES = 16  # properties that may distinguish alternatives
UNENFORCEABLE = (
    "has keywords that cannot be enforced while the answer is written: {value}; remove them, or have them ignored by"
    ' `"strict": false`, which `response_format` and the functions of tools may have'
)
MAX_SHOWN = 5  # places in an error


class EnforceableSchema(NamedTuple):
    """A schema that llguidance enforces, and the ignored keywords."""

    schema: Json
    unenforced: tuple[str, ...] = ()  # ignored keywords with their places, such as `uniqueItems at $.tags`


def enforceable_schema(key: str, schema: Json, strict: bool = True) -> EnforceableSchema:
    """Return the schema to enforce. `key` is the field for errors. Raises InvalidRequest if `strict` and a keyword
    cannot be enforced."""
    document = SchemaRewriter(copy.deepcopy(schema))
    found = [f"{name} at {path}" for path, part in reachable(document.root) for name in document.unenforced(part)]
    open_root = copy.deepcopy(document.root)
    _close(document.root)
    found += _rewrite_one_of(document.root, open_root)
    document.add_clauses()
    if found and strict:
        more = f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
        raise refusal(key, UNENFORCEABLE, f"{', '.join(found[:MAX_SHOWN])}{more}")
    return EnforceableSchema(document.root, tuple(found))


def _close(root: Json) -> None:
    parts = list(_within(root))
    if any(map(_combines, parts)):
        return
    for part in parts:
        names, required = part.get("properties"), part.get("required", [])
        if isinstance(names, dict) and isinstance(required, list) and all(f"{each}" in names for each in required):
            part.setdefault("additionalProperties", False)


def _combines(schema: Json) -> bool:
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return several or ("properties" in schema and any(name in schema for name in COMBINING_BESIDE))


def _within(schema: Any) -> Iterator[Json]:
    """Yield the schema and all subschemas, including unreferenced definitions."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name, value in schema.items():
        parts = [value] if name in OF_ONE else value if name in OF_LIST else ()
        if name in OF_NAMES and isinstance(value, dict):
            parts = value.values()
        for part in parts if isinstance(value, (dict, list)) else ():
            yield from _within(part)


def _rewrite_one_of(root: Json, open_root: Json) -> Iterator[str]:
    """Rewrite every `oneOf` to an `anyOf`, and yield the places of those whose alternatives may overlap. An alternative
    of the closed schema `root` is compared with the others in `open_root`, where objects may have more properties."""
    comparison = DisjointnessChecker(MAX_STEPS)
    pairs = list(zip(reachable(root), reachable(open_root), strict=False))
    for (path, part), (_, open_part) in pairs:
        alternatives, others = part.get("oneOf"), open_part.get("oneOf")
        if not isinstance(alternatives, list) or not isinstance(others, list):
            continue
        beside = {name: value for name, value in open_part.items() if name != "oneOf"}
        views = [SchemaView(open_root, {"allOf": [each, beside]}) for each in others]
        exact = next((each for each in _versions(root, part) if _exclude(comparison, root, each, views)), None)
        del part["oneOf"]
        any_of = {"anyOf": alternatives if exact is None else exact}
        part |= {"allOf": [*listed(part.get("allOf")), any_of]} if "anyOf" in part else any_of
        if exact is None:
            yield f"oneOf (two alternatives may allow the same value) at {path}"


def _exclude(
    comparison: DisjointnessChecker, root: Json, alternatives: Sequence[Any], others: Sequence[SchemaView]
) -> bool:
    """Return True if no value of an alternative is valid for another one."""
    return all(
        comparison.are_disjoint(SchemaView(root, one), other)
        for i, one in enumerate(alternatives)
        for j, other in enumerate(others)
        if i != j
    )


def _versions(root: Json, part: Json) -> Iterator[list[Any]]:
    """Yield variants of the alternatives that may be disjoint: unchanged; if each only requires one property, without
    the properties of the others; and with a common property required that may distinguish them."""
    alternatives = part["oneOf"]
    yield alternatives
    names = [each["required"][0] for each in alternatives if _only_requires_one(each)]
    if len(names) == len(alternatives):
        yield [{"required": [name], "properties": {each: False for each in names if each != name}} for name in names]
        return
    discriminator, first = part.get("discriminator"), alternatives[0] if alternatives else None
    if isinstance(discriminator, dict):
        candidates = texts_in([discriminator.get("propertyName")])
    else:
        first = (
            resolved(root, first["$ref"]) if isinstance(first, dict) and isinstance(first.get("$ref"), str) else first
        )
        properties = first.get("properties") if isinstance(first, dict) else None
        candidates = set(list(properties)[:MAX_CANDIDATES]) if isinstance(properties, dict) else set()
    for name in sorted(candidates):
        yield [{"allOf": [each, {"required": [name]}]} for each in alternatives]


def _only_requires_one(schema: Any) -> bool:
    required = schema.get("required") if isinstance(schema, dict) and schema.keys() == {"required"} else None
    return isinstance(required, list) and len(required) == 1 and isinstance(required[0], str)
