"""Keywords of JSON schemas that llguidance does not enforce. Those that say nothing where they stand, or that others
can say, are rewritten; the rest is for the caller to refuse or to leave out."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.wire.json_positions import Json, listed, resolved, texts_in

EVALUATING = (
    *("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
# A format that is in neither list is a note.
ENFORCED_FORMATS = "date-time date time duration email hostname ipv4 ipv6 uri uuid".split()
UNENFORCED_FORMATS = (
    "idn-email idn-hostname uri-reference iri iri-reference uri-template json-pointer relative-json-pointer regex"
).split()
IRREGULAR = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9]|\\k<)")  # look-around, references to groups
NOTES = ("title", "description", "examples", "default", "$comment")
MAX_NAMES = 256  # of `propertyNames` that are written out
MAX_REFERENCES = 8  # one to another, of `propertyNames`


@dataclass
class Document:
    """A schema that is rewritten. `later` holds clauses, each with the schema that it is to be added to when objects
    have been closed (json_schemas.py): they name no properties of their own."""

    root: Json
    later: list[tuple[Json, Json]] = field(default_factory=list)

    def unenforced(self, schema: Json) -> list[str]:
        """Return the keywords of this one schema that cannot be enforced, and take out or rewrite all that llguidance
        would refuse."""
        return [name for name, rule in RULES.items() if name in schema and not rule(self, schema)]

    def add_clauses(self) -> None:
        for schema, clause in self.later:
            schema["allOf"] = [*listed(schema.get("allOf")), clause]


Rule = Callable[[Document, Json], bool]  # whether it is enforced, now that it is rewritten


def _unique_items(document: Document, schema: Json) -> bool:
    return schema.pop("uniqueItems") is not True or schema.get("maxItems", 2) in (0, 1)


def _contains(document: Document, schema: Json) -> bool:
    schema.pop("contains")
    return schema.get("minContains") == 0 and "maxContains" not in schema


def _not(document: Document, schema: Json) -> bool:
    return schema.pop("not") is False


def _if(document: Document, schema: Json) -> bool:
    schema.pop("if")
    return "then" not in schema and "else" not in schema


def _dependencies(document: Document, schema: Json) -> bool:
    """Older drafts have the next two in one."""
    for name, other in _named(schema.pop("dependencies")).items():
        keyword = "dependentRequired" if isinstance(other, list) else "dependentSchemas"
        schema[keyword] = {**_named(schema.get(keyword)), name: other}
    return True


def _dependent_required(document: Document, schema: Json) -> bool:
    """An object lacks the name or has the others, too."""
    for name, others in _named(schema.pop("dependentRequired")).items():
        clause = {"anyOf": [{"properties": {name: False}}, {"required": [name, *listed(others)]}]}
        document.later.append((schema, clause))
    return True


def _dependent_schemas(document: Document, schema: Json) -> bool:
    for name, other in _named(schema.pop("dependentSchemas")).items():
        clause = {"anyOf": [{"properties": {name: False}}, {"required": [name], "allOf": [other]}]}
        schema["allOf"] = [*listed(schema.get("allOf")), clause]
    return True


def _unevaluated(name: str, same: str) -> Rule:
    """Return the rule of a keyword that says what `same` does where nothing else is evaluated."""

    def rule(document: Document, schema: Json) -> bool:
        value = schema.pop(name)
        if value is True or value == {}:
            return True
        if any(keyword in schema for keyword in EVALUATING) or isinstance(schema.get("items"), list):
            return False
        schema.setdefault(same, value)
        return True

    return rule


def _property_names(document: Document, schema: Json) -> bool:
    """Names of a list become `properties` and those of a pattern `patternProperties`, if there are no others."""
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


def _min_properties(document: Document, schema: Json) -> bool:
    """llguidance counts only where all names are required."""
    names, required, count = _named(schema.get("properties")), texts_in(schema.get("required")), schema["minProperties"]
    if names.keys() <= required or not isinstance(count, int):
        return True
    del schema["minProperties"]
    if count == 1 and not required:
        document.later.append((schema, {"anyOf": [{"required": [name]} for name in names]}))
    return count <= max(1, len(required))


def _max_properties(document: Document, schema: Json) -> bool:
    names, required, count = _named(schema.get("properties")), texts_in(schema.get("required")), schema["maxProperties"]
    if names.keys() <= required or not isinstance(count, int):
        return True
    del schema["maxProperties"]
    return count >= len(names) and schema.get("additionalProperties") is False and "patternProperties" not in schema


def _format(document: Document, schema: Json) -> bool:
    name = schema["format"]
    if name not in ENFORCED_FORMATS:
        del schema["format"]
    return name not in UNENFORCED_FORMATS


def _pattern(document: Document, schema: Json) -> bool:
    if isinstance(schema["pattern"], str) and IRREGULAR.search(schema["pattern"]):
        del schema["pattern"]
    return "pattern" in schema


def _removed(name: str, is_enforced: bool) -> Rule:
    """Return the rule of a keyword that says nothing by itself, or what cannot be enforced."""
    return lambda document, schema: (schema.pop(name), is_enforced)[1]


# In the order in which they are looked at: some are rewritten into others.
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
