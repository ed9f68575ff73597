"""Proof that two JSON schemas are disjoint, so that no value is valid for both. A `oneOf` can only be enforced if its
alternatives are disjoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from engine.wire.json_subschemas import Json, listed, resolved, texts_in

KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")
# Keywords that bound a value of each kind
BOUNDS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
}
MAX_DEPTH = 32


class SchemaView(NamedTuple):
    """A schema, and the document in which its references are resolved."""

    root: Json
    schema: Any

    def of(self, schema: Any) -> SchemaView:
        return SchemaView(self.root, schema)


class SchemaFacts(NamedTuple):
    """Properties that all values of a schema have."""

    view: SchemaView
    facets: list[SchemaView]  # a value is valid for all: the schema itself, its `$ref`, and its `allOf`
    kinds: set[str]
    values: list[set[str]]  # a value is in each of these sets, see _canonical
    required: set[str]  # names of properties


class DisjointnessChecker:
    """Searches proofs that two schemas are disjoint. After `max_steps` steps in total every search fails."""

    def __init__(self, max_steps: int):
        self._steps_left = max_steps
        self._known: dict[tuple[int, int], SchemaFacts] = {}

    def are_disjoint(self, one: SchemaView, other: SchemaView, depth: int = 0) -> bool:
        """Return True if it is proven that no value is valid for both schemas."""
        self._steps_left -= 1
        if self._steps_left < 0 or depth > MAX_DEPTH:
            return False
        if one.schema is False or other.schema is False:
            return True
        ones, others = self._facts(one), self._facts(other)
        kinds = ones.kinds & others.kinds
        lists = [*ones.values, *others.values]
        if not kinds or (lists and not set.intersection(*lists)):
            return True
        for these, those in ((ones, other), (others, one)):
            for alternatives in _alternatives(these.facets):
                if all(self.are_disjoint(each, those, depth + 1) for each in alternatives):
                    return True
        return all(self._differ(kind, ones, others, depth + 1) for kind in kinds)

    def _facts(self, view: SchemaView) -> SchemaFacts:
        key = id(view.root), id(view.schema)
        if key not in self._known:
            facets = list(self._facets(view))
            values = [{_canonical(value) for value in each} for one in facets if (each := _values(one)) is not None]
            required = set().union(*(texts_in(each.schema.get("required")) for each in facets))
            self._known[key] = SchemaFacts(view, facets, _kinds(facets), values, required)
        return self._known[key]

    def _facets(self, view: SchemaView, depth: int = 0) -> Iterator[SchemaView]:
        self._steps_left -= 1
        if not isinstance(view.schema, dict) or depth > MAX_DEPTH or self._steps_left < 0:
            return
        yield view
        if isinstance(reference := view.schema.get("$ref"), str):
            yield from self._facets(view.of(resolved(view.root, reference)), depth + 1)
        for each in listed(view.schema.get("allOf")):
            yield from self._facets(view.of(each), depth + 1)

    def _differ(self, kind: str, ones: SchemaFacts, others: SchemaFacts, depth: int) -> bool:
        """Return True if no value of this kind is valid for both schemas."""
        facets = [*ones.facets, *others.facets]
        if kind in BOUNDS and _are_apart(*BOUNDS[kind], facets, kind in ("integer", "number")):
            return True
        return kind == "object" and self._have_other_properties(ones, others, depth)

    def _have_other_properties(self, ones: SchemaFacts, others: SchemaFacts, depth: int) -> bool:
        """Return True if a required property is forbidden by one schema, or has disjoint schemas in the two."""
        for name in sorted(ones.required | others.required):
            self._steps_left -= 1
            one, other = list(_properties(name, ones.facets)), list(_properties(name, others.facets))
            if self._steps_left < 0 or any(each.schema is False for each in (*one, *other)):
                return self._steps_left >= 0
            if any(self.are_disjoint(a, b, depth) for a in one for b in other):
                return True
        return False


def _alternatives(facets: list[SchemaView]) -> Iterator[list[SchemaView]]:
    for view in facets:
        for name in ("anyOf", "oneOf"):
            if isinstance(view.schema.get(name), list):
                yield [view.of(each) for each in view.schema[name]]


def _kinds(facets: list[SchemaView]) -> set[str]:
    """Return the kinds of values that are possible. Whole numbers are a separate kind."""
    kinds = set(KINDS)
    for view in facets:
        if (values := _values(view)) is not None:
            kinds &= {_kind_of(value) for value in values}
        named = view.schema.get("type", list(KINDS))
        allowed = texts_in(named if isinstance(named, list) else [named])
        kinds &= {*allowed, "integer"} if "number" in allowed else allowed
    return kinds


def _values(view: SchemaView) -> list[Any] | None:
    if "const" in view.schema:
        return [view.schema["const"]]
    return view.schema["enum"] if isinstance(view.schema.get("enum"), list) else None


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float) and value.is_integer():
        return "integer"
    names = {type(None): "null", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _canonical(value: Any) -> str:
    """Return a text that is the same for equal values: 1 equals 1.0, but not true."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, list):
            return [plain(each) for each in value]
        return {name: plain(each) for name, each in value.items()} if isinstance(value, dict) else value

    return json.dumps(plain(value), sort_keys=True)


def _are_apart(low: str, high: str, facets: list[SchemaView], are_numbers: bool) -> bool:
    """Return True if a lower bound exceeds an upper bound, so that no value satisfies all facets."""
    lows = [(bound, False) for view in facets if _is_number(bound := view.schema.get(low))]
    highs = [(bound, False) for view in facets if _is_number(bound := view.schema.get(high))]
    if are_numbers:
        lows += [(b, True) for view in facets if _is_number(b := view.schema.get("exclusiveMinimum"))]
        highs += [(b, True) for view in facets if _is_number(b := view.schema.get("exclusiveMaximum"))]
    return any(a > b or (a == b and (a_out or b_out)) for a, a_out in lows for b, b_out in highs)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _properties(name: str, facets: list[SchemaView]) -> Iterator[SchemaView]:
    """Yield the schemas that the value of this property must be valid for, as far as the facets name them."""
    for view in facets:
        properties = view.schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            yield view.of(properties[name])
        elif "patternProperties" not in view.schema and view.schema.get("additionalProperties") is False:
            yield view.of(False)
