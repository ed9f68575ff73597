"""Grammars that harm a server which compiles and follows them in its engine process. Each call returns a different
grammar, so that the server does not refuse it because it is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Fields = dict[str, Any]
Rng = random.Random


def _large_multiple(rng: Rng) -> Fields:
    """Return a schema that takes minutes and gigabytes to compile."""
    return {"guided_json": {"type": "integer", "multipleOf": rng.randrange(10**6, 10**7) | 1}}


def _product(rng: Rng) -> Fields:
    """Return a schema that takes a second to compile."""
    return {"guided_json": {"type": "integer", "multipleOf": rng.randrange(60_000, 99_991) | 1, "minimum": 3}}


def _range_near_the_limit(rng: Rng) -> Fields:
    """Return a schema that crashes the grammar library."""
    low = -(2**63) + rng.randrange(100)
    return {"guided_json": {"anyOf": [{"type": "integer", "minimum": low, "maximum": low + 8}]}}


def _ambiguous(rng: Rng) -> Fields:
    """Return a grammar that compiles in milliseconds, but takes a second for each token after some tokens."""
    return {"guided_grammar": f"root ::= [^\\n]{{1,{rng.randrange(10**4, 10**6)}}} [^\\n]* [^\\n]{{1,}} | root{{2}}"}


def _recursive(rng: Rng) -> Fields:
    """Return a recursive grammar that compiles in milliseconds, but takes a second for each token after some tokens."""
    return {"guided_grammar": f"root ::= root{{1,}} root? | [\\x00-\\x7F]{{0,{rng.randrange(1000, 9000)}}}"}


def _long_repetition(rng: Rng) -> Fields:
    return {"guided_regex": f"(zy{rng.randrange(100)}){{{rng.randrange(20_000, 60_000)},}}"}


def _many_texts(rng: Rng) -> Fields:
    return {"guided_choice": ["".join(rng.choices("abc d", k=25)) for _ in range(3000)]}


def _wide_object(rng: Rng) -> Fields:
    names = [f"k{rng.randrange(10**9)}" for _ in range(1500)]
    return {"guided_json": {"type": "object", "properties": {name: {"type": "string"} for name in names}}}


def _product_of_alternatives(rng: Rng) -> Fields:
    def part(index: int) -> Fields:
        return {"anyOf": [{"properties": {f"p{index}{each}{rng.randrange(10**6)}": {}}} for each in range(4)]}

    return {"guided_json": {"allOf": [part(index) for index in range(12)]}}


def _deep_rules(rng: Rng) -> Fields:
    count = rng.randrange(5000, 7000)
    rules = "\n".join(f"r{index}: r{index + 1}" for index in range(count))
    return {"guided_grammar": f'start: r0\n{rules}\nr{count}: "a"'}


def _automaton_of_many_states(rng: Rng) -> Fields:
    return {"guided_regex": f"(a|b)*a(a|b){{{rng.randrange(30, 300)}}}x*"}


KINDS: tuple[Callable[[Rng], Fields], ...] = (
    _large_multiple,
    _product,
    _range_near_the_limit,
    _ambiguous,
    _recursive,
    _long_repetition,
    _many_texts,
    _wide_object,
    _product_of_alternatives,
    _deep_rules,
    _automaton_of_many_states,
)


def hostile_grammar(rng: Rng) -> Fields:
    """Return the native field of a request with a random hostile grammar."""
    return rng.choice(KINDS)(rng)
