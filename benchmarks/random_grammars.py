"""Random grammars of every field that asks for structured output: most are valid, many are at the limits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Rng = random.Random
NUMBERS = (0, 1, -1, 3, 10, 255, 1000, 10**6, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, 1e-9, 1e300)
COUNTS = (0, 1, 2, 3, 7, 50, 1000, 10**5, 10**9)
CHARACTERS = ("a", "b", "z", "0", "9", " ", "\\n", "\\d", "\\w", "\\s", "é", "中", "😀", "\\x00", ".", "\\.", "\\u{41}")
FORMATS = (
    "date-time",
    "date",
    "time",
    "email",
    "uuid",
    "ipv4",
    "ipv6",
    "uri",
    "hostname",
    "duration",
    "no-such-format",
)
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")


def schema(rng: Rng, depth: int = 3) -> Any:
    """Return a JSON schema, which may contradict itself."""
    if depth == 0 or rng.random() < 0.1:
        return rng.choice([True, {}, {"const": rng.choice([1, "x", None, [1]])}, {"enum": [1, "a", None]}, False])
    combine = rng.random()
    if combine < 0.2:
        return {rng.choice(["anyOf", "oneOf", "allOf"]): [schema(rng, depth - 1) for _ in range(rng.randint(1, 4))]}
    if combine < 0.25:
        return {
            "$ref": rng.choice(["#", "#/$defs/a", "#/$defs/b", "#/nowhere"]),
            "$defs": {"a": schema(rng, depth - 1)},
        }
    if combine < 0.28:
        return {rng.choice(["not", "if", "contains", "propertyNames"]): schema(rng, depth - 1)}
    kind = rng.choice(TYPES)
    found: dict[str, Any] = {"type": kind if rng.random() < 0.9 else rng.sample(TYPES, 2)}
    for keyword, value in _keywords(rng, kind, depth).items():
        if rng.random() < 0.4:
            found[keyword] = value
    return found


def _keywords(rng: Rng, kind: str, depth: int) -> dict[str, Any]:
    if kind in ("integer", "number"):
        bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        return {name: rng.choice(NUMBERS) * rng.choice([1, 1, 7]) for name in bounds}
    if kind == "string":
        lengths = {name: rng.choice(COUNTS) for name in ("minLength", "maxLength")}
        return {**lengths, "pattern": regex(rng), "format": rng.choice(FORMATS)}
    if kind == "array":
        items = [schema(rng, depth - 1) for _ in range(2)]
        counts = {name: rng.choice(COUNTS) for name in ("minItems", "maxItems")}
        return {**counts, "items": items[0], "prefixItems": items, "uniqueItems": rng.random() < 0.5}
    if kind == "object":
        names = [f"{rng.choice('abc')}{index}" for index in range(rng.choice([1, 2, 5, 40]))]
        counts = {name: rng.choice(COUNTS) for name in ("minProperties", "maxProperties")}
        return {
            **counts,
            "properties": {name: schema(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": rng.choice([False, True, schema(rng, depth - 1)]),
            "patternProperties": {regex(rng, 1): schema(rng, depth - 1)},
        }
    return {}


def regex(rng: Rng, depth: int = 3) -> str:
    if depth == 0:
        return rng.choice(
            [*CHARACTERS, "[a-z]", "[^a]", "[^\\n]", "[\\x00-\\x7f]", "\\p{L}", "(?:)", "[]", "(", "(?=a)"]
        )
    choice = rng.random()
    if choice < 0.35:
        return "".join(regex(rng, depth - 1) for _ in range(rng.randint(1, 4)))
    if choice < 0.6:
        return "(" + "|".join(regex(rng, depth - 1) for _ in range(rng.randint(2, 4))) + ")"
    low = rng.choice(COUNTS)
    times = rng.choice(["*", "+", "?", "*?", f"{{{low}}}", f"{{{low},}}", f"{{{low},{low + rng.choice(COUNTS)}}}"])
    return f"({regex(rng, depth - 1)}){times}"


def _symbols(rng: Rng, names: list[str], terminal: Callable[[], str]) -> str:
    parts = []
    for _ in range(rng.randint(0, 4)):
        part = rng.choice(names) if rng.random() < 0.5 else terminal()
        count = rng.choice(COUNTS)
        parts.append(part + rng.choice(["", "", "", "*", "+", "?", f"{{{count}}}", f"{{1,{count + 1}}}"]))
    return " ".join(parts)


def _rules(rng: Rng, start: str, separator: str, terminal: Callable[[], str]) -> str:
    names = [start, *(f"r{index}" for index in range(rng.choice([0, 1, 3, 20])))]
    if rng.random() < 0.05:
        names.append("missing")
    return "\n".join(
        f"{name} {separator} " + " | ".join(_symbols(rng, names, terminal) or '""' for _ in range(rng.randint(1, 3)))
        for name in names
        if name != "missing"
    )


def gbnf(rng: Rng) -> str:
    classes = ("[a-z]", "[^\\n]", "[0-9]", '"x"', '"\\n"', '"é"', "[\\x00-\\x7F]", '""', "[^]", "(root)")
    return _rules(rng, "root", "::=", lambda: rng.choice(classes))


def lark(rng: Rng) -> str:
    def terminal() -> str:
        pattern = regex(rng, 2).replace("/", "")
        return rng.choice(['"x"', '"a".."f"', f"/{pattern}/", "WORD", f"%json {json.dumps(schema(rng, 1))}"])

    return _rules(rng, "start", ":", terminal) + f"\nWORD: /{regex(rng, 2).replace('/', '')}/"


def structural_tag(rng: Rng) -> dict[str, Any]:
    begin, end = rng.choice(["<f>", "<", "", "é"]), rng.choice(["</f>", ">", "", "\n"])
    structure = {"begin": begin, "schema": schema(rng, 2), "end": end}
    return {"type": "structural_tag", "structures": [structure] * rng.randint(1, 3), "triggers": [begin[:1]]}


KINDS: tuple[tuple[str, Callable[[Rng], Any]], ...] = (
    ("guided_json", schema),
    ("guided_json", schema),
    ("guided_regex", regex),
    ("guided_grammar", gbnf),
    ("guided_grammar", lark),
    ("structural_tag", structural_tag),
)
