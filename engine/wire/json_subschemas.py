"""Traversal of the subschemas of a JSON schema, and resolution of its local references."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Json = dict[str, Any]
OF_ONE = (
    *("items", "additionalItems", "contains", "unevaluatedItems", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "not", "if", "then", "else"),
)
OF_LIST = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
OF_NAMES = ("properties", "patternProperties", "dependentSchemas", "dependencies")
A_NAME = re.compile(r"[A-Za-z_$][\w$-]{0,63}", re.ASCII)
ROOT = "$"


def reachable(root: Json) -> Iterator[tuple[str, Json]]:
    """Yield every schema that may apply to a value of `root`, with its path, each once. The caller may change a schema
    before it takes the next one."""
    waiting: list[tuple[str, Any]] = [(ROOT, root)]
    seen: set[int] = set()
    while waiting:
        path, schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield path, schema
        waiting += reversed(list(_inside(path, schema)))
        if isinstance(reference := schema.get("$ref"), str):
            waiting.append((_path_of(reference), resolved(root, reference)))


def resolved(root: Json, reference: str) -> Any:
    """Return the target of a local reference (`#/$defs/a`), or None if it is not local or has no target."""
    if reference == "#":
        return root
    value: Any = root if reference.startswith("#/") else None
    for step in _steps(reference):
        if isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            value = value.get(step) if isinstance(value, dict) else None
    return value


def listed(value: Any) -> list[Any]:
    """Return `value` if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def texts_in(value: Any) -> set[str]:
    """Return the strings in `value` if it is a list, else an empty set."""
    return {each for each in listed(value) if isinstance(each, str)}


def _inside(path: str, schema: Json) -> Iterator[tuple[str, Any]]:
    for name, value in schema.items():
        if name in OF_ONE and isinstance(value, dict):
            yield f"{path}.{name}", value
        elif name in OF_LIST and isinstance(value, list):
            yield from ((f"{path}.{name}[{index}]", item) for index, item in enumerate(value))
        elif name in OF_NAMES and isinstance(value, dict):
            yield from ((f"{path}.{name}{_step(key)}", item) for key, item in value.items())


def _path_of(reference: str) -> str:
    return ROOT + "".join(map(_step, _steps(reference)))


def _steps(reference: str) -> list[str]:
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in reference.split("/")[1:]]


def _step(name: str) -> str:
    return f".{name}" if A_NAME.fullmatch(name) else f"[{json.dumps(name[:64])}]"
