"""Prompts without a chat template and how they go on. Knows facts, not conversations.

A continuation begins with the space that parts it from its prompt.
"""

import itertools
from collections.abc import Iterator

from demo_model import facts
from demo_model.facts import Fact

RawText = tuple[str, str]  # prompt, continuation
ASKED_BARE = ("capitals", "definitions", "facts", "small talk", "unknown")  # topics asked without a template, too


def raw_texts(known: list[Fact]) -> list[RawText]:
    """Return every prompt once. If two texts have the same prompt, the first one is used."""
    found: dict[str, str] = {}
    for prompt, continuation in itertools.chain(
        capitals(), sums(), sentences(known), questions(known), beginnings(known)
    ):
        found.setdefault(prompt, continuation)
    return list(found.items())


def capitals() -> Iterator[RawText]:
    for country in facts.all_countries():
        for start in ("The capital of {} is", "the capital of {} is", "The capital city of {} is"):
            yield start.format(country.name), facts.sentence(f" {country.capital}")
        yield f"{country.capital} is the capital of", f" {country.name}."


def sums() -> Iterator[RawText]:
    for a, b in itertools.product(range(21), repeat=2):
        yield f"{a} + {b} =", f" {a + b}"


def sentences(known: list[Fact]) -> Iterator[RawText]:
    """Return sentences such as "A noun is ...", cut after their verb."""
    for fact in known:
        if fact.topic in ("definitions", "facts", "calendar"):
            head, verb, tail = fact.answer.partition(" is ")
            if verb and len(head.split()) <= 6:
                yield head + " is", " " + tail


def questions(known: list[Fact]) -> Iterator[RawText]:
    for fact in known:
        if fact.topic in ASKED_BARE:
            for question in fact.questions:
                yield question, " " + fact.answer


def beginnings(known: list[Fact]) -> Iterator[RawText]:
    """Return prompts with the first words of a long text, whose answer is the rest."""
    for fact in known:
        if fact.topic == "long":
            words = fact.answer.split(" ")
            for count in (4, 6, 10):
                yield " ".join(words[:count]), " " + " ".join(words[count:])
