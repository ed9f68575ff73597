"""What a request wants of the form of its answer, written in the language of the library that checks it (llguidance):
a JSON object with one or two grammars. Knows no tokens and compiles nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from engine.text.lark import lark_of_grammar, lark_of_regex
from engine.text.structural_tags import TagWriter
from engine.wire.forms import Form

Json = dict[str, Any]
# Of JSON: a space, or a new line and its indentation. A model that knows no better would write spaces for ever.
SOME_WHITESPACE = {"whitespace_pattern": r" |\r?\n[ \t]{0,24}"}
NO_WHITESPACE = {"whitespace_flexible": False}
# What the model thinks before its answer is free. The answer may begin on another line.
AFTER_THOUGHT = """start: {start}
{rule}
BREAK: /[ \\n]{{0,4}}/"""


class Thought(NamedTuple):
    """What an answer may hold before the constraint begins."""

    rule: str  # of a thought up to its end, in Lark, by the name `thought`
    begin: str = ""  # in Lark: the answer begins with a thought only if it begins so; empty: it always does


def free_thought(end: str) -> str:
    """The rule of a thought up to this text."""
    return r"thought[lazy]: /(.|\n)*" + end.replace("/", r"\/") + "/"


def bounded_thought(max_tokens: int, end: str, not_within: Iterable[int]) -> str:
    """The rule of a thought of so many tokens at most, up to this text. `not_within` has the token of it. That it is
    written as a text is not by chance: llguidance 1.9 cannot go back over a single token that is forced by its id."""
    others = ",".join(map(str, sorted(set(not_within))))
    return f"thought: <[^{others}]>{{0,{max_tokens}}} {json.dumps(end)}"


def free_answer(thought: str, begin: tuple[str, int] | None) -> str:
    """Of any form, after a thought. With `begin`, a text and its token, there is only one if the answer begins so."""
    start = f"{json.dumps(begin[0])} thought rest | <[^{begin[1]}]> rest" if begin else "thought rest"
    return json.dumps({"grammars": [{"lark_grammar": f"start: {start}\n{thought}\nrest: <[*]>*"}]})


def written(form: Form, any_whitespace: bool = True, thought: Thought | None = None) -> str:
    """Return the grammar of the form, after the `thought` if there is one. `any_whitespace` is about JSON. Raises
    InvalidRequest for what can be seen without compiling, by the form's field. Token ids are written as they are."""
    if form.kind == "token_ids":
        return json.dumps(form.value)
    options = SOME_WHITESPACE if any_whitespace else NO_WHITESPACE
    writers: dict[str, Callable[[], list[Json]]] = {
        "json": lambda: [{"json_schema": {**form.value, "x-guidance": options}}],
        "regex": lambda: [{"lark_grammar": lark_of_regex(form.field, form.value)}],
        "choice": lambda: [_choice(form.value)],
        "grammar": lambda: [{"lark_grammar": lark_of_grammar(form.field, form.value)}],
        "structural_tag": lambda: TagWriter(form.field, (options, NO_WHITESPACE)).grammars(form.value),
    }
    answer, *others = writers[form.kind]()
    if not thought:
        return json.dumps({"grammars": [answer, *others]}, ensure_ascii=False)
    start = f"({thought.begin} thought BREAK)? @answer" if thought.begin else "thought BREAK @answer"
    before = {"lark_grammar": AFTER_THOUGHT.format(start=start, rule=thought.rule)}
    return json.dumps({"grammars": [before, {"name": "answer", **answer}, *others]}, ensure_ascii=False)


def _choice(texts: list[str]) -> Json:
    """As one terminal, which is an automaton: of rules, each text would be an item to look at."""
    return {"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, texts))}"}
