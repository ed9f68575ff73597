"""Grammars of structured outputs in the format of llguidance: a JSON object with one or more grammars. Independent of
token ids; nothing is compiled here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from engine.text.lark import lark_of_grammar, lark_of_regex
from engine.text.structural_tags import TagWriter
from engine.wire.structured_output import StructuredOutput

Json = dict[str, Any]
# Whitespace of JSON: a space, or a new line with indentation. Small models would write whitespace without end.
SOME_WHITESPACE = {"whitespace_pattern": r" |\r?\n[ \t]{0,24}"}
NO_WHITESPACE = {"whitespace_flexible": False}
# The reasoning before the answer is unconstrained. The answer may begin on another line.
AFTER_REASONING = """start: {start}
{rule}
BREAK: /[ \\n]{{0,4}}/"""


class ReasoningPrefix(NamedTuple):
    """Reasoning that an answer may contain before its grammar begins."""

    rule: str  # Lark rule named `thought`: the reasoning up to its end
    begin: str = ""  # Lark: the answer has reasoning only if it begins with this; empty: it always has reasoning


def unlimited_reasoning(end: str) -> str:
    """Return the Lark rule of reasoning up to the text `end`."""
    return r"thought[lazy]: /(.|\n)*" + end.replace("/", r"\/") + "/"


def limited_reasoning(max_tokens: int, end: str, excluded_ids: Iterable[int]) -> str:
    """Return the Lark rule of at most `max_tokens` tokens of reasoning up to the text `end`. `excluded_ids` contains
    its token id. The end is written as text on purpose: llguidance 1.9 cannot roll back a single token that is forced
    by its id."""
    others = ",".join(map(str, sorted(set(excluded_ids))))
    return f"thought: <[^{others}]>{{0,{max_tokens}}} {json.dumps(end)}"


def unconstrained_answer(reasoning: str, begin: tuple[str, int] | None) -> str:
    """Return the grammar of any answer after the rule `reasoning`. With `begin`, a text and its token id, reasoning is
    only expected if the answer begins with it."""
    start = f"{json.dumps(begin[0])} thought rest | <[^{begin[1]}]> rest" if begin else "thought rest"
    return json.dumps({"grammars": [{"lark_grammar": f"start: {start}\n{reasoning}\nrest: <[*]>*"}]})


def write_grammar(
    output: StructuredOutput, any_whitespace: bool = True, reasoning: ReasoningPrefix | None = None
) -> str:
    """Return the grammar of a structured output, preceded by `reasoning` if given. `any_whitespace` applies to JSON.
    The token ids of `allowed_token_ids` are returned as a JSON list. Raises InvalidRequest, with the request's field,
    for errors that are found without compiling."""
    if output.kind == "token_ids":
        return json.dumps(output.value)
    options = SOME_WHITESPACE if any_whitespace else NO_WHITESPACE
    writers: dict[str, Callable[[], list[Json]]] = {
        "json": lambda: [{"json_schema": {**output.value, "x-guidance": options}}],
        "regex": lambda: [{"lark_grammar": lark_of_regex(output.field, output.value)}],
        "choice": lambda: [_choice(output.value)],
        "grammar": lambda: [{"lark_grammar": lark_of_grammar(output.field, output.value)}],
        "structural_tag": lambda: TagWriter(output.field, (options, NO_WHITESPACE)).grammars(output.value),
    }
    answer, *others = writers[output.kind]()
    if not reasoning:
        return json.dumps({"grammars": [answer, *others]}, ensure_ascii=False)
    start = f"({reasoning.begin} thought BREAK)? @answer" if reasoning.begin else "thought BREAK @answer"
    before = {"lark_grammar": AFTER_REASONING.format(start=start, rule=reasoning.rule)}
    return json.dumps({"grammars": [before, {"name": "answer", **answer}, *others]}, ensure_ascii=False)


def _choice(texts: list[str]) -> Json:
    """Return a grammar with all texts in one terminal, which is an automaton: with rules, the parser would have to look
    at one item per text."""
    return {"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, texts))}"}
