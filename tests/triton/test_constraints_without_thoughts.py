"""Constraints on a server that tells thoughts apart, of a model that does not think: they hold from the first token."""

from __future__ import annotations

import json
import re

import pytest

from tests.triton.asking import CHAT

SETTINGS = {"REASONING_PARSER": "qwen3", "TOOL_CALL_PARSER": "llama3_json"}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
LIKELY = {"30": -100}  # "<", so that no answer begins with `<think>`
ASKED = {
    "choice": ({"guided_choice": ["yes", "no"]}, "yes|no"),
    "regex": ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    "schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}}, None),
    "grammar": ({"guided_grammar": 'start: "(" /[0-9]/ ")"'}, r"\([0-9]\)"),
    "required": ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, None),
    "named": ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}, None),
}


def answer_of(client, stream, **fields):
    """Return the content, the reasoning and the arguments of the calls."""
    extra = {name: fields.pop(name) for name in [*fields] if name.startswith(("guided_", "chat_template"))}
    asked = {"model": "demo", "messages": CHAT, "max_tokens": 60, "temperature": 2, **fields}
    asked |= {"logit_bias": LIKELY, "extra_body": extra}
    answer = client.chat.completions.create(stream=stream, **asked)
    parts = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    calls = [call.function.arguments or "" for part in parts for call in part.tool_calls or ()]
    texts = ["".join(getattr(part, name, None) or "" for part in parts) for name in ("content", "reasoning_content")]
    return *texts, "".join(calls)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("enable_thinking", [None, True, False])
@pytest.mark.parametrize("name", ASKED)
def test_an_answer_without_a_thought_keeps_to_its_constraint(client, name, enable_thinking, stream):
    fields, pattern = ASKED[name]
    wish = {} if enable_thinking is None else {"chat_template_kwargs": {"enable_thinking": enable_thinking}}
    for seed in range(3):
        content, reasoning, arguments = answer_of(client, stream, seed=seed, **fields, **wish)
        assert reasoning == ""
        if pattern:
            assert re.fullmatch(pattern, content), content
        else:
            assert json.loads(arguments or content) in [{"city": "Paris"}, {"city": "Rome"}]
            assert bool(arguments) == ("tools" in fields)
