"""What an answer is made by, of the JSON schema that a client gives: whatever it allows the schema allows, too.

Objects have the properties that are named, and no others: a schema that says nothing of those allows them, and small
models go on inventing some; vLLM, llama.cpp and Outlines do the same. What cannot be enforced is refused with its
place, or left out where the client says that it need not be.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from engine.wire.checks import refusal
from engine.wire.json_disjoint import Comparison, View
from engine.wire.json_keywords import Document
from engine.wire.json_positions import Json, listed, reachable, resolved, texts_in

OF_ONE = ("items", "additionalProperties")
OF_LIST = ("prefixItems", "anyOf", "oneOf", "allOf")
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
# They speak of properties of the same object that are named elsewhere: nothing is closed then.
COMBINING_BESIDE = ("allOf", "anyOf", "oneOf", "$ref", "minProperties")
MAX_STEPS = 10_000  # for the proofs that alternatives of one schema are disjoint
MAX_CANDIDATES = 16  # properties that may tell alternatives apart
UNENFORCEABLE = (
    "has keywords that cannot be enforced while the answer is written: {value}; remove them, or have them ignored by"
    ' `"strict": false`, which `response_format` and the functions of tools may have'
)
MAX_SHOWN = 5  # places in an error


class Followed(NamedTuple):
    schema: Json
    unenforced: tuple[str, ...] = ()  # keywords that are left out, each with its place: `uniqueItems at $.tags`


def to_follow(key: str, schema: Json, strict: bool = True) -> Followed:
    """Return the schema that the answer is made by. Raise InvalidRequest if `strict` and something in it cannot be
    enforced."""
    document = Document(copy.deepcopy(schema))
    found = [f"{name} at {path}" for path, part in reachable(document.root) for name in document.unenforced(part)]
    open_root = copy.deepcopy(document.root)
    _close(document.root)
    found += _rewrite_one_of(document.root, open_root)
    document.add_clauses()
    if found and strict:
        more = f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
        raise refusal(key, UNENFORCEABLE, f"{', '.join(found[:MAX_SHOWN])}{more}")
    return Followed(document.root, tuple(found))


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
    """Yield the schema and all schemas in it, also those that nothing refers to."""
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
    """Make every `oneOf` an `anyOf`. Yield the places of those whose alternatives may overlap: a value of one, which
    has only the named properties, may be allowed by another, which in `open_root` may have more."""
    comparison = Comparison(MAX_STEPS)
    pairs = list(zip(reachable(root), reachable(open_root), strict=False))
    for (path, part), (_, open_part) in pairs:
        alternatives, others = part.get("oneOf"), open_part.get("oneOf")
        if not isinstance(alternatives, list) or not isinstance(others, list):
            continue
        beside = {name: value for name, value in open_part.items() if name != "oneOf"}
        views = [View(open_root, {"allOf": [each, beside]}) for each in others]
        exact = next((each for each in _versions(root, part) if _exclude(comparison, root, each, views)), None)
        del part["oneOf"]
        any_of = {"anyOf": alternatives if exact is None else exact}
        part |= {"allOf": [*listed(part.get("allOf")), any_of]} if "anyOf" in part else any_of
        if exact is None:
            yield f"oneOf (two alternatives may allow the same value) at {path}"


def _exclude(comparison: Comparison, root: Json, alternatives: Sequence[Any], others: Sequence[View]) -> bool:
    """No value of an alternative is allowed by another one."""
    return all(
        comparison.are_disjoint(View(root, one), other)
        for i, one in enumerate(alternatives)
        for j, other in enumerate(others)
        if i != j
    )


def _versions(root: Json, part: Json) -> Iterator[list[Any]]:
    """Yield the alternatives as they are; those that only require one property each, without the others' ones; and all
    with one and the same property required, which may tell them apart."""
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
