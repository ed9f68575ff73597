"""Structural tags in xgrammar's format: what texts they allow, by the library that is asked for tokens, and what is
refused."""

import json

import pytest
from llguidance import LLMatcher

from engine.errors import InvalidRequest
from engine.grammars.vocabulary import Vocabulary
from engine.text.grammars import write_grammar
from engine.wire import STRUCTURED_OUTPUT_FIELDS
from tests.byte_tokenizer import EOS_ID
from tests.pure.guided import Guided, a_request

INT = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}


def const(text):
    return {"type": "const_string", "value": text}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags, triggers=("<",), **flags):
    return {"type": "triggered_tags", "triggers": [*triggers], "tags": [*tags], **flags}


N, M = tag("<n>", INT, "</n>"), tag("<m>", const("x"), ["</m>", "!"])
REPEATED = {"content": const("ab")}
# The format, what it allows and what it does not
FORMATS = {
    "const_string": (const('a"\n/é😀'), ['a"\n/é😀'], ["a", 'a"\n/é😀b']),
    "json_schema": (INT, ["12"], ["x", "1 2"]),
    "regex": ({"type": "regex", "pattern": "[a-c]{2}/"}, ["ab/"], ["ad/", "a/"]),
    "grammar of two": (
        {
            "type": "sequence",
            "elements": [{"type": "grammar", "grammar": f"root ::= x\nx ::= [{each}]"} for each in ("ab", "cd")],
        },
        ["ac", "bd"],
        ["ab", "ca"],
    ),
    "any_text": (ANY, ["", "what ever\n"], []),
    "any_text without": ({**ANY, "excludes": ["bad", "(.)"]}, ["ba", "(x)"], ["a bad one", "(.)"]),
    "any_text of a length": ({**ANY, "max_chars": 3}, ["", "é😀a"], ["abcd"]),
    "sequence": ({"type": "sequence", "elements": [const("a"), INT, const("b")]}, ["a1b"], ["ab", "a1"]),
    "or": ({"type": "or", "elements": [const("a"), tag("<", ANY, ">")]}, ["a", "<a>", "<>"], ["b", "<a"]),
    "optional": ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
    "plus": ({"type": "plus", **REPEATED}, ["ab", "abab"], ["", "aba"]),
    "star": ({"type": "star", **REPEATED}, ["", "abab"], ["aba"]),
    "repeat": ({"type": "repeat", "min": 1, "max": 2, **REPEATED}, ["ab", "abab"], ["", "ababab"]),
    "repeat without a bound": ({"type": "repeat", "min": 2, "max": -1, **REPEATED}, ["abab", "ababab"], ["ab"]),
    "repeat never": ({"type": "repeat", "min": 0, "max": 0, **REPEATED}, [""], ["ab"]),
    "tag": (M, ["<m>x</m>", "<m>x!"], ["<m>x", "<m></m>"]),
    "text in a tag": (tag("<t>", ANY, ["</t>", "!"]), ["<t>a<t></t>", "<t>!"], ["<t>a</t>b", "<t>a!</t>"]),
    "text without its end in a tag": (
        tag("<t>", {**ANY, "excludes": ["</t>", "</"], "max_chars": 4}, "</t>"),
        ["<t>a<b</t>"],
        ["<t>a</b</t>", "<t>abcde</t>"],
    ),
    "text before a text": (
        {"type": "sequence", "elements": [ANY, const("END"), {"type": "optional", "content": const("!")}]},
        ["END", "a ENEND", "aEND!"],
        ["a", "aENDb"],
    ),
    "text before a tag": ({"type": "sequence", "elements": [ANY, N]}, ["<n>1</n>", "a <m><n>1</n>"], ["a <n>x"]),
    "triggered_tags": (
        triggered(N, M),
        ["", "a b", "<n>1</n>", "a<m>x! b <n>2</n>c"],
        ["a<b", "<n>x</n>", "<n>1", "<"],
    ),
    "two triggers": (triggered(N, M, triggers=("<n", "<m>")), ["a < b", "<n>1</n><m>x!"], ["<n1", "<m>y"]),
    "at_least_one": (triggered(N, M, at_least_one=True), ["<n>1</n>", "<m>x!a<n>2</n>"], ["", "a<n>1</n>"]),
    "stop_after_first": (triggered(N, M, stop_after_first=True), ["a<n>1</n>", "a"], ["<n>1</n>a", "<n>1</n><m>x!"]),
    "one and no more": (triggered(N, at_least_one=True, stop_after_first=True), ["<n>1</n>"], ["", "<n>1</n> "]),
    "excludes": (triggered(N, excludes=["bad"]), ["ba<n>1</n>d"], ["bad", "bad<n>1</n>"]),
    "triggered_tags in a tag": (
        tag("[", triggered(N), "]"),
        ["[]", "[a<n>1</n>b]", "[<n>1</n><n>2</n>]"],
        ["[", "[<n>1]", "[]]"],
    ),
    "tags_with_separator": (
        {"type": "tags_with_separator", "tags": [N, M], "separator": ", "},
        ["", "<n>1</n>", "<m>x!, <n>2</n>"],
        ["<n>1</n>, ", "<n>1</n><n>2</n>", "a"],
    ),
    "one separated tag": (
        {"type": "tags_with_separator", "tags": [N], "separator": ",", "at_least_one": True, "stop_after_first": True},
        ["<n>1</n>"],
        ["", "<n>1</n>,<n>2</n>"],
    ),
    "dispatch": ({"type": "dispatch", "rules": [["n=", INT]]}, ["a", "a n=1 b", "n=1n=2"], ["n=x", "n="]),
    "dispatch once": ({"type": "dispatch", "rules": [["n=", INT]], "loop": False}, ["a", "a n=1"], ["n=1 b"]),
    "tokens": (
        tag({"type": "token", "token": ord("<")}, {"type": "any_tokens"}, {"type": "token", "token": ord(">")}),
        ["<>", "<ab>"],
        ["<", "ab>", "<ab>>"],
    ),
    "other tokens": (
        {"type": "sequence", "elements": [{"type": "exclude_token", "exclude_tokens": [97]}, const("a")]},
        ["ba", "ca"],
        ["aa"],
    ),
    "a nested tree": (
        {"type": "sequence", "elements": [tag("<think>", ANY, "</think>"), triggered(N, at_least_one=True)]},
        ["<think>a <n></think><n>1</n> b"],
        ["<n>1</n>", "<think>a</think>b"],
    ),
}


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary(tokenizer, EOS_ID + 1).of_library


def allows(vocabulary, structured_output, text):
    matcher = LLMatcher(vocabulary, structured_output, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = [*text.encode()]
    if matcher.validate_tokens(token_ids) < len(token_ids):
        return False
    return matcher.consume_tokens(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", FORMATS)
def test_a_tree_of_formats_allows_what_it_says(name, vocabulary):
    tree, allowed, forbidden = FORMATS[name]
    structured_output = write_grammar(
        STRUCTURED_OUTPUT_FIELDS["response_format"]("response_format", {"type": "structural_tag", "format": tree}),
        False,
    )
    assert {text: allows(vocabulary, structured_output, text) for text in allowed} == dict.fromkeys(allowed, True)
    assert {text: allows(vocabulary, structured_output, text) for text in forbidden} == dict.fromkeys(forbidden, False)


@pytest.mark.slow
def test_an_answer_follows_a_tree_of_formats(tokenizer):
    guided = Guided(tokenizer)
    tree = {"type": "sequence", "elements": [const("n: "), N, {"type": "plus", "content": M}]}
    likely = tuple((token_id, 5.0) for token_id in tokenizer.encode("!"))
    value = json.dumps({"type": "structural_tag", "format": tree})
    text = guided.run(a_request("a", "structural_tag", value, logit_bias=likely))
    assert text.startswith("n: <n>") and "</n><m>x" in text and text.endswith(("!", "</m>"))


REFUSED = {
    "another type": ({"type": "table"}, '`.format` must have a `type` of [const_string, json_schema, .*"table"'),
    "a wrong part": (
        {"type": "sequence", "elements": [const("a"), {"type": "tag", "begin": "<", "content": {}, "end": ">"}]},
        r"`.format.elements\[1\].content` must have a `type`",
    ),
    "no parts": ({"type": "or", "elements": []}, r"`.format` must have a list of `elements`, it is \[\]"),
    "another style": ({**INT, "style": "qwen_xml"}, '`.format` has the `style` "qwen_xml", only `json` is supported'),
    "tokens": ({**ANY, "max_tokens": 5}, "`.format` has `max_tokens` 5, which is not supported"),
    "a wrong schema": (
        {"type": "json_schema", "json_schema": {"not": {}}},
        r"`.format.json_schema` has keywords that cannot be enforced .* not at \$",
    ),
    "no end": ({"type": "star", "content": ANY}, "`.format` repeats any_text, which has no end"),
    "less than the minimum": ({"type": "repeat", "min": 2, "max": 1, **REPEATED}, "has `max` 1, less than `min`"),
    "no trigger": (triggered(N, triggers=["["]), 'has a structure that none of its triggers begins: "<n>"'),
    "a wrong rule": ({"type": "dispatch", "rules": [["a"]]}, r"`.format.rules\[0\]` must be a text and a format"),
    "a wrong token": (
        tag({"token": "a b"}, ANY, ">"),
        '`.format.begin.token` must hold token ids, "a b" is none',
    ),
    "too deep": ({"type": "optional", "content": None}, "nested"),
}
deepest = REFUSED["too deep"][0]
for _ in range(100):
    deepest["content"] = deepest = {"type": "optional", "content": None}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_tree_is_refused_with_the_place_of_the_error(name):
    tree, says = REFUSED[name]
    says = says.replace("`.format", r"`structural_tag\.format").replace("[const", r"\[const")
    with pytest.raises(InvalidRequest, match=says) as caught:
        STRUCTURED_OUTPUT_FIELDS["structural_tag"]("structural_tag", {"format": tree})
    assert caught.value.field == "structural_tag"


def test_text_whose_end_nothing_would_tell_is_refused():
    structured_output = STRUCTURED_OUTPUT_FIELDS["structural_tag"](
        "structural_tag", {"format": {"type": "sequence", "elements": [ANY, INT]}}
    )
    with pytest.raises(InvalidRequest, match="`structural_tag` has `any_text` without an end: what follows it must"):
        write_grammar(structured_output)
