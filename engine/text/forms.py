"""What a request wants of the form of its answer, written in the language of the library that checks it (llguidance):
a JSON object with one or two grammars. Knows no tokens and compiles nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from llguidance import StructTag, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.errors import InvalidRequest, literally
from engine.wire.checks import shown
from engine.wire.forms import Form

Json = dict[str, Any]
# Of JSON: a space, or a new line and its indentation. A model that knows no better would write spaces for ever.
SOME_WHITESPACE = {"whitespace_pattern": r" |\r?\n[ \t]{0,24}"}
NO_WHITESPACE = {"whitespace_flexible": False}
A_RULE_OF_EBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
UNENDING = 10**6  # tokens; no answer is as long
# What the model thinks before its answer is free. The answer may begin on another line.
AFTER_THOUGHT = """start: thought BREAK @answer
%s
BREAK: /[ \\n]{0,4}/"""


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


def written(form: Form, any_whitespace: bool = True, thought: str = "") -> str:
    """`any_whitespace` is about JSON. With the rule of a `thought` the form begins after that. Raises InvalidRequest
    for what can be seen without compiling, by the form's field."""
    options = SOME_WHITESPACE if any_whitespace else NO_WHITESPACE
    answer = {
        "json": lambda: {"json_schema": {**form.value, "x-guidance": options}},
        "regex": lambda: _regex(form),
        "choice": lambda: _choice(form.value),
        "grammar": lambda: _grammar(form),
        "token_ids": lambda: _token_ids(form.value),
        "structural_tag": lambda: _structural_tag(form, options),
    }[form.kind]()
    if not thought:
        return json.dumps({"grammars": [answer]}, ensure_ascii=False)
    before = {"lark_grammar": AFTER_THOUGHT % thought}
    return json.dumps({"grammars": [before, {"name": "answer", **answer}]}, ensure_ascii=False)


def _regex(form: Form) -> Json:
    """Digits and letters of `\\d` and `\\w` are those of ASCII, as in JSON schemas."""
    if (len(form.value) - len(form.value.rstrip("\\"))) % 2:
        raise InvalidRequest("The `{field}` ends with a backslash that escapes nothing", field=form.field)
    return {"lark_grammar": f"start: /{regex_to_lark(form.value, 'dw')}/"}


def _choice(texts: list[str]) -> Json:
    """As one terminal, which is an automaton: of rules, each text would be an item to look at."""
    return {"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, texts))}"}


def _grammar(form: Form) -> Json:
    """Lark as it is, EBNF of llama.cpp's kind translated."""
    if not A_RULE_OF_EBNF.search(form.value):
        return {"lark_grammar": form.value}
    try:
        return {"lark_grammar": gbnf_to_lark(form.value)}
    except Exception as error:  # the library raises all sorts
        raise InvalidRequest(f"The `{{field}}` cannot be read: {literally(str(error))}", field=form.field) from None


def _token_ids(token_ids: list[int]) -> Json:
    """Never complete, so that an end of the answer must be one of them."""
    return {"lark_grammar": f"start: <[{','.join(map(str, token_ids))}]>{{{UNENDING}}}"}


def _structural_tag(form: Form, options: Json) -> Json:
    """Free text; wherever one of the triggers occurs, one of the structures that begin with it follows."""
    tags = []
    for structure in form.value["structures"]:
        begin, schema = structure["begin"], {**structure["schema"], "x-guidance": options}
        trigger = next((each for each in form.value["triggers"] if begin.startswith(each)), None)
        if trigger is None:
            text = "The `{field}` has a structure that none of its triggers begins: {value}"
            raise InvalidRequest(text, field=form.field, value=shown(begin))
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=structure["end"]))
    return {"lark_grammar": StructTag.to_grammar(tags, assume_special=False)}
