"""What a request wants of the form of its answer, written in the language of the library that checks it (llguidance):
a JSON object with one or two grammars. Knows no tokens and compiles nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from engine.errors import InvalidRequest
from engine.wire.forms import Form

Json = dict[str, Any]
NO_WHITESPACE = {"whitespace_flexible": False}
# What the model thinks before its answer is free. The answer may begin on another line.
THOUGHT = r"""start: thought BREAK @answer
thought[lazy]: /(.|\n)*%s/
BREAK: /[ \n]{0,4}/"""


def written(form: Form, any_whitespace: bool = True, thought_end: str = "") -> str:
    """`any_whitespace` is about JSON. With `thought_end` the form begins after that text. Raises InvalidRequest for
    what can be seen without compiling."""
    answer = KINDS[form.kind](form.value)
    schema = answer.get("json_schema")
    if schema is not None and not any_whitespace:
        answer = {"json_schema": {**schema, "x-guidance": NO_WHITESPACE}}
    if not thought_end:
        return json.dumps({"grammars": [answer]}, ensure_ascii=False)
    thought = {"lark_grammar": THOUGHT % thought_end.replace("/", r"\/")}
    return json.dumps({"grammars": [thought, {"name": "answer", **answer}]}, ensure_ascii=False)


def _json(schema: Json) -> Json:
    return {"json_schema": schema}


def _regex(regex: str) -> Json:
    [grammar] = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"]  # between slashes, its own escaped
    return {"lark_grammar": grammar["lark_grammar"]}


def _choice(texts: list[str]) -> Json:
    return {"lark_grammar": "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)}


def _grammar(text: str) -> Json:
    """Lark as it is, EBNF of llama.cpp's kind translated."""
    try:
        return {"lark_grammar": any_to_lark(text)}
    except Exception as error:  # the library raises all sorts
        raise InvalidRequest(f"the grammar cannot be read: {error}") from None


def _structural_tag(tag: Json) -> Json:
    """Free text; wherever one of the triggers occurs, one of the structures that begin with it follows."""
    tags = []
    for structure in tag["structures"]:
        trigger = next((each for each in tag["triggers"] if structure["begin"].startswith(each)), None)
        if trigger is None:
            raise InvalidRequest(f"no trigger begins the structure {json.dumps(structure['begin'])}")
        tags.append(
            StructTag(
                trigger=trigger, begin=structure["begin"], grammar=structure.get("schema") or {}, end=structure["end"]
            )
        )
    return {"lark_grammar": StructTag.to_grammar(tags, assume_special=False)}


KINDS: dict[str, Callable[[Any], Json]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
