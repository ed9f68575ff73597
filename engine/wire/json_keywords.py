"""Keywords of JSON schemas that llguidance does not enforce. Those that have no effect, or that other keywords can
express, are rewritten. The caller refuses or ignores the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.wire.json_subschemas import Json, listed, resolved, texts_in

EVALUATING = (
    *("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
# A format in neither list is an annotation without effect.
ENFORCED_FORMATS = "date-time date time duration email hostname ipv4 ipv6 uri uuid".split()
UNENFORCED_FORMATS = (
    "idn-email idn-hostname uri-reference iri iri-reference uri-template json-pointer relative-json-pointer regex"
).split()
IRREGULAR = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9]|\\k<)")  # look-around, back references
NOTES = ("title", "description", "examples", "default", "$comment")
MAX_NAMES = 256  # of `propertyNames` that are listed as properties
MAX_REFERENCES = 8  # in a chain of references of `propertyNames`


@dataclass
class SchemaRewriter:
    """Rewrites the schema `root` in place. `later` has pairs of a schema and a clause that `add_clauses` adds to it
    after objects are closed (json_schemas.py): a clause must not be closed itself."""

    root: Json
    later: list[tuple[Json, Json]] = field(default_factory=list)

    def unenforced(self, schema: Json) -> list[str]:
        """Return the keywords of `schema`, without its subschemas, that cannot be enforced. Remove or rewrite all that
        llguidance would refuse."""
        return [name for name, rule in RULES.items() if name in schema and not rule(self, schema)]

    def add_clauses(self) -> None:
        """Add the collected clauses to their schemas."""
        for schema, clause in self.later:
            schema["allOf"] = [*listed(schema.get("allOf")), clause]


Rule = Callable[[SchemaRewriter, Json], bool]  # returns whether the keyword is enforced after the rewrite


def _unique_items(document: SchemaRewriter, schema: Json) -> bool:
    return schema.pop("uniqueItems") is not True or schema.get("maxItems", 2) in (0, 1)


def _contains(document: SchemaRewriter, schema: Json) -> bool:
    schema.pop("contains")
    return schema.get("minContains") == 0 and "maxContains" not in schema


def _not(document: SchemaRewriter, schema: Json) -> bool:
    return schema.pop("not") is False


def _if(document: SchemaRewriter, schema: Json) -> bool:
    schema.pop("if")
    return "then" not in schema and "else" not in schema


def _dependencies(document: SchemaRewriter, schema: Json) -> bool:
    """Split the keyword of older drafts into `dependentRequired` and `dependentSchemas`."""
    for name, other in _named(schema.pop("dependencies")).items():
        keyword = "dependentRequired" if isinstance(other, list) else "dependentSchemas"
        schema[keyword] = {**_named(schema.get(keyword)), name: other}
    return True


def _dependent_required(document: SchemaRewriter, schema: Json) -> bool:
    """Rewrite to: an object lacks the name, or has the other names as well."""
    for name, others in _named(schema.pop("dependentRequired")).items():
        clause = {"anyOf": [{"properties": {name: False}}, {"required": [name, *listed(others)]}]}
        document.later.append((schema, clause))
    return True


def _dependent_schemas(document: SchemaRewriter, schema: Json) -> bool:
    for name, other in _named(schema.pop("dependentSchemas")).items():
        clause = {"anyOf": [{"properties": {name: False}}, {"required": [name], "allOf": [other]}]}
        schema["allOf"] = [*listed(schema.get("allOf")), clause]
    return True


def _unevaluated(name: str, same: str) -> Rule:
    """Return the rule of a keyword that equals `same` if the schema has no keyword that evaluates more."""

    def rule(document: SchemaRewriter, schema: Json) -> bool:
        value = schema.pop(name)
        if value is True or value == {}:
            return True
        if any(keyword in schema for keyword in EVALUATING) or isinstance(schema.get("items"), list):
            return False
        schema.setdefault(same, value)
        return True

    return rule


def _property_names(document: SchemaRewriter, schema: Json) -> bool:
    """Rewrite listed names to `properties` and a pattern to `patternProperties`, if the schema has neither."""
    names, others = schema.pop("propertyNames"), schema.get("additionalProperties", True)
    for _ in range(MAX_REFERENCES):
        if isinstance(names, dict) and isinstance(names.get("$ref"), str):
            names = resolved(document.root, names["$ref"])
    if not isinstance(names, dict):
        return names is True
    names = {key: value for key, value in names.items() if key not in NOTES}
    if names in ({}, {"type": "string"}):
        return True
    if "properties" in schema or "patternProperties" in schema:
        return False
    if "const" in names:
        names["enum"] = [names.pop("const")]
    names_listed, pattern = names.get("enum"), names.get("pattern")
    if names.keys() <= {"type", "enum"} and isinstance(names_listed, list) and len(names_listed) <= MAX_NAMES:
        schema["properties"] = {name: others for name in names_listed if isinstance(name, str)}
    elif names.keys() <= {"type", "pattern"} and isinstance(pattern, str):
        schema["patternProperties"] = {pattern: others}
    elif names.keys() <= {"type", "minLength", "maxLength"}:
        bounds = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
        schema["patternProperties"] = {rf"^[\s\S]{{{bounds}}}$": others}
    else:
        return False
    schema["additionalProperties"] = False
    return True


def _min_properties(document: SchemaRewriter, schema: Json) -> bool:
    """Rewrite the minimum, which llguidance enforces only if all named properties are required."""
    names, required, count = _named(schema.get("properties")), texts_in(schema.get("required")), schema["minProperties"]
    if names.keys() <= required or not isinstance(count, int):
        return True
    del schema["minProperties"]
    if count == 1 and not required:
        document.later.append((schema, {"anyOf": [{"required": [name]} for name in names]}))
    return count <= max(1, len(required))


def _max_properties(document: SchemaRewriter, schema: Json) -> bool:
    names, required, count = _named(schema.get("properties")), texts_in(schema.get("required")), schema["maxProperties"]
    if names.keys() <= required or not isinstance(count, int):
        return True
    del schema["maxProperties"]
    return count >= len(names) and schema.get("additionalProperties") is False and "patternProperties" not in schema


def _format(document: SchemaRewriter, schema: Json) -> bool:
    name = schema["format"]
    if name not in ENFORCED_FORMATS:
        del schema["format"]
    return name not in UNENFORCED_FORMATS


def _pattern(document: SchemaRewriter, schema: Json) -> bool:
    if isinstance(schema["pattern"], str) and IRREGULAR.search(schema["pattern"]):
        del schema["pattern"]
    return "pattern" in schema


def _removed(name: str, is_enforced: bool) -> Rule:
    """Return the rule that removes a keyword."""
    return lambda document, schema: (schema.pop(name), is_enforced)[1]


# In the order of application: some keywords are rewritten to later ones.
RULES: dict[str, Rule] = {
    "dependencies": _dependencies,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "unevaluatedProperties": _unevaluated("unevaluatedProperties", "additionalProperties"),
    "unevaluatedItems": _unevaluated("unevaluatedItems", "items"),
    "propertyNames": _property_names,
    "minProperties": _min_properties,
    "maxProperties": _max_properties,
    "uniqueItems": _unique_items,
    "contains": _contains,
    "minContains": _removed("minContains", True),
    "maxContains": _removed("maxContains", True),
    "not": _not,
    "if": _if,
    "then": _removed("then", True),
    "else": _removed("else", True),
    "format": _format,
    "pattern": _pattern,
    "$dynamicRef": _removed("$dynamicRef", False),
    "$recursiveRef": _removed("$recursiveRef", False),
}


def _named(value: Any) -> Json:
    return value if isinstance(value, dict) else {}
