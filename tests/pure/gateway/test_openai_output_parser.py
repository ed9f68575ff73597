"""Tests of the separation of reasoning, text and tool calls, in texts that are cut at every place."""

import itertools
import json

import pytest

from gateway.openai.output_parser import CONTENT, REASONING, TOOL_CALL, OutputParser
from gateway.openai.output_syntax import CONTENT_MARKERS, FORMATS, OutputSyntax

HERMES, LLAMA, MISTRAL, DEEPSEEK = (FORMATS[name] for name in ("hermes", "llama3_json", "mistral", "deepseek"))


def a_call(name="f", arguments='{"a": 1}', key="arguments"):
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def deepseek(name, arguments='{"a": 1}'):
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


NEWER_DEEPSEEK = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'


def read(text, cuts=(), is_forced=False, names=(), **dialect):
    """Parse `text` in pieces that end at `cuts`. Return content, reasoning, and the name and arguments of each call."""
    reader = OutputParser(OutputSyntax(**dialect), is_forced, names=names)
    places = [0, *cuts, len(text)]
    parts = [part for start, end in itertools.pairwise(places) for part in reader.push(text[start:end])]
    parts += reader.push("", is_end=True)
    calls = {}
    for part in parts:
        if part.kind == TOOL_CALL:
            name, arguments = calls.get(part.call_index, (part.name, ""))
            calls[part.call_index] = name, arguments + part.text
    assert reader.num_calls == len(calls)
    assert list(calls) == list(range(len(calls)))
    return (
        "".join(part.text for part in parts if part.kind == CONTENT),
        "".join(part.text for part in parts if part.kind == REASONING),
        list(calls.values()),
    )


ERNIE = "<response>\nYes </b>.\n</response>\n"
ERNIES = {"reasoning": "does", "calls": HERMES, "around": CONTENT_MARKERS["ernie"]}
NESTED = '{"a": {"b": "}]\\"{", "c": [1, {"d": null}]}, "e": "</tool_call>"}'
CASES = {
    "plain words": ("Hello <b> {x}", {}, ("Hello <b> {x}", "", [])),
    "words where calls might be": ("Hello < there\n", {"calls": HERMES}, ("Hello < there\n", "", [])),
    "one call": (
        f"<tool_call>\n{a_call()}\n</tool_call>",
        {"calls": HERMES},
        ("", "", [("f", '{"a": 1}')]),
    ),
    "words around two calls": (
        f"Let me see.\n\n<tool_call>\n{a_call()}\n</tool_call>\n<tool_call>{a_call('g', NESTED)}</tool_call>\nDone. ",
        {"calls": HERMES},
        ("Let me see.Done. ", "", [("f", '{"a": 1}'), ("g", NESTED)]),
    ),
    "arguments first, another key, a text": (
        '<tool_call>{"id": 3, "arguments": "{\\"x\\": 1}", "name": "f"}</tool_call>',
        {"calls": HERMES},
        ("", "", [("f", '{"x": 1}')]),
    ),
    "an object of arguments first": (
        '<tool_call>{"arguments": {"x": {}} , "name" : "f"}',
        {"calls": HERMES},
        ("", "", [("f", '{"x": {}}')]),
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', {"calls": HERMES}, ("", "", [("f", "{}")])),
    "null": ('<tool_call>{"name": "f", "arguments": null}', {"calls": HERMES}, ("", "", [("f", "{}")])),
    "an object that is no call": (
        'x <tool_call>\n{"nome": "f"}\n</tool_call> y',
        {"calls": HERMES},
        ('x <tool_call>\n{"nome": "f"}\n</tool_call> y', "", []),
    ),
    "a name that is none": (
        '<tool_call>{"name": 3}</tool_call>',
        {"calls": HERMES},
        ('<tool_call>{"name": 3}</tool_call>', "", []),
    ),
    "no object": (" <tool_call>\nhm</tool_call>", {"calls": HERMES}, (" <tool_call>\nhm</tool_call>", "", [])),
    "cut short in the name": ('a <tool_call>{"name": "f', {"calls": HERMES}, ('a <tool_call>{"name": "f', "", [])),
    "cut short after the mark": ("a\n<tool_call>\n", {"calls": HERMES}, ("a\n<tool_call>\n", "", [])),
    "cut short in the mark of one more": (
        f"<tool_call>{a_call()}</tool_call>\n<tool",
        {"calls": HERMES},
        ("", "", [("f", '{"a": 1}')]),
    ),
    "cut short in the arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        {"calls": HERMES},
        ("", "", [("f", '{"a": "b')]),
    ),
    "llama": (a_call(key="parameters"), {"calls": LLAMA}, ("", "", [("f", '{"a": 1}')])),
    "llama, two and a word": (
        f"<|python_tag|>{a_call(key='parameters')}; {a_call('g', '{}', 'parameters')} ok",
        {"calls": LLAMA},
        ("ok", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    "llama, JSON that is no call": (' {"a": [1]}\n', {"calls": LLAMA}, (' {"a": [1]}\n', "", [])),
    "llama, JSON after words": (f"So: {a_call()}", {"calls": LLAMA}, (f"So: {a_call()}", "", [])),
    "mistral": (
        f"[TOOL_CALLS] [{a_call()}, {a_call('g')}]",
        {"calls": MISTRAL},
        ("", "", [("f", '{"a": 1}'), ("g", '{"a": 1}')]),
    ),
    "mistral, forced": (f"[{a_call()}]", {"calls": MISTRAL, "is_forced": True}, ("", "", [("f", '{"a": 1}')])),
    "mistral, words with brackets": ("a [1] [b", {"calls": MISTRAL}, ("a [1] [b", "", [])),
    "deepseek, words and two calls": (
        f"So.\n<｜tool▁calls▁begin｜>{deepseek('f')}\n{deepseek('g', NESTED)}<｜tool▁calls▁end｜>",
        {"calls": DEEPSEEK},
        ("So.", "", [("f", '{"a": 1}'), ("g", NESTED)]),
    ),
    "deepseek, newer": (
        f"<｜tool▁calls▁begin｜>{NEWER_DEEPSEEK}<｜tool▁calls▁end｜>",
        {"calls": DEEPSEEK},
        ("", "", [("f", '{"a": 1}')]),
    ),
    "deepseek, cut short": (deepseek("f")[:-40], {"calls": DEEPSEEK}, (deepseek("f")[:-40], "", [])),
    "deepseek, cut short in the arguments": (
        f"<｜tool▁calls▁begin｜>{deepseek('f', NESTED)[:75]}",
        {"calls": DEEPSEEK},
        ("", "", [("f", NESTED[: 75 - len(deepseek("f").partition("{")[0])])]),
    ),
    "deepseek, no call": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜> x",
        {"calls": DEEPSEEK},
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜> x", "", []),
    ),
    "a thought": ("<think>\nhm <b\n</think>\n\nYes.", {"reasoning": "may"}, ("Yes.", "hm <b", [])),
    "no thought": ("<thin air>", {"reasoning": "may"}, ("<thin air>", "", [])),
    "a thought that does not say so": ("hm</think>Yes. </think>", {"reasoning": "does"}, ("Yes. </think>", "hm", [])),
    "only thoughts": ("<think>hm </th", {"reasoning": "does"}, ("", "hm </th", [])),
    "an empty thought": ("<think>\n\n</think>\n\nYes", {"reasoning": "may"}, ("Yes", "", [])),
    "a thought and a call": (
        f"<think>\n<tool_call>?\n</think>\n\n<tool_call>\n{a_call()}\n</tool_call>",
        {"reasoning": "may", "calls": HERMES},
        ("", "<tool_call>?", [("f", '{"a": 1}')]),
    ),
    "ernie": (f"hm</think>\n\n\n{ERNIE}", ERNIES, ("Yes </b>.", "hm", [])),
    "ernie, without a thought": (f"\n{ERNIE}", {**ERNIES, "reasoning": "never"}, ("Yes </b>.", "", [])),
    "ernie, words and a call": (
        f"{ERNIE}<tool_call>\n{a_call()}\n</tool_call>\n",
        {**ERNIES, "reasoning": "never"},
        ("Yes </b>.", "", [("f", '{"a": 1}')]),
    ),
    "ernie, a call": (
        f"hm\n</think>\n\n\n<tool_call>\n{a_call()}\n</tool_call>\n",
        ERNIES,
        ("", "hm", [("f", '{"a": 1}')]),
    ),
    "ernie, words as they are": ("hm</think>\n<res> </response>", ERNIES, ("<res> </response>", "hm", [])),
    "ernie, cut short": ("</think><response>\nYes </resp", ERNIES, ("Yes </resp", "", [])),
    "ernie, cut short before words": ("</think>\n<resp", ERNIES, ("<resp", "", [])),
    "nothing": ("", {"reasoning": "may", "calls": LLAMA}, ("", "", [])),
}


@pytest.mark.parametrize("name", CASES)
def test_however_a_text_is_cut_its_parts_are_the_same(name):
    text, options, expected = CASES[name]
    assert read(text, **options) == expected
    assert read(text, range(1, len(text)), **options) == expected
    for place in range(1, len(text)):
        assert read(text, [place], **options) == expected


def test_deepseeks_calls_that_must_be_are_written_as_its_models_write_them():
    written = [f'{before}{{"a": 1}}{after}' for before, after in DEEPSEEK.around("f")]
    assert written == [deepseek("f"), f"\n{deepseek('f')}", NEWER_DEEPSEEK]


@pytest.mark.slow
def test_a_name_that_is_nested_deeply_is_no_call():
    text = '<tool_call>{"name": ' + "[" * 100_000 + "]" * 100_000 + "}</tool_call>"
    assert read(text, calls=HERMES) == (text, "", [])


def test_words_and_arguments_do_not_wait_for_the_end():
    reader = OutputParser(OutputSyntax(HERMES))
    assert [part.text for part in reader.push("Let me")] == ["Let me"]
    assert [part.text for part in reader.push(" see <to")] == [" see"]
    assert reader.push('ol_call>{"name": "f"') == []
    assert reader.push(', "arguments": {"a": "lo') == [(TOOL_CALL, "", 0, "f"), (TOOL_CALL, '{"a": "lo', 0, None)]
    assert reader.push("ng") == [(TOOL_CALL, "ng", 0, None)]


def test_arguments_are_what_the_model_wrote():
    for arguments in ({"a": "é\n\\"}, {}, {"deep": [[{"x": {}}]]}, {"q": '"}'}):
        for text in (json.dumps(arguments), json.dumps(arguments, indent=2, ensure_ascii=False)):
            [(_, read_arguments)] = read(f"<tool_call>{a_call(arguments=text)}</tool_call>", calls=HERMES)[2]
            assert read_arguments == text
