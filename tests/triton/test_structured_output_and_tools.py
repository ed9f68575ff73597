"""Tests of structured output, tools and reasoning of the whole server, with the clients of every protocol."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import anthropic
import jsonschema
import openai
import pydantic
import pytest

from tests.patience import wait_until
from tests.server import ROOT
from tests.triton.asking import CHAT, GrpcStream, facts, post, stream_lines, wait_until_idle

SETTINGS = {"BATCH_SIZE": "16", "SPECULATE_METHOD": "ngram", "TOOL_CALL_PARSER": "hermes"}
CAPITAL = {
    "type": "object",
    "properties": {
        "country": {"type": "string", "maxLength": 20},
        "capital": {"enum": ["London", "Paris", "Rome"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999},
    },
    "required": ["country", "capital", "population"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 10}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
RUN_BATCH = "import sys; from server_scripts.run_batch import main; sys.exit(main())"
TOOLS = [{"type": "function", "function": WEATHER}]


def chat(client, **fields):
    return client.chat.completions.create(**{"model": "demo", "messages": CHAT, "max_tokens": 200, **fields})


def test_an_answer_to_a_schema_is_valid_streamed_or_not(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "capital", "schema": CAPITAL, "strict": True}}
    for seed in range(4):
        whole = chat(client, response_format=wanted, seed=seed)
        jsonschema.validate(json.loads(whole.choices[0].message.content), CAPITAL)
        chunks = chat(client, response_format=wanted, seed=seed, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed == whole.choices[0].message.content
        assert whole.choices[0].finish_reason == "stop"


def test_an_agent_gets_calls_or_text_of_its_schema_without_unnamed_properties(client):
    """Agents send tools and the format of their last answer with every request; schemas seldom forbid others."""
    city = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": city}}]
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": city}}
    reported = set()
    for seed in range(12):
        fields = {
            "tools": tools,
            "parallel_tool_calls": False,
            "response_format": wanted,
            "seed": seed,
            "temperature": 2,
        }
        answer = chat(client, **fields).choices[0]
        calls = answer.message.tool_calls
        assert json.loads(calls[0].function.arguments if calls else answer.message.content) == {"city": "Rome"}
        reported.add(answer.finish_reason)
    assert reported == {"stop", "tool_calls"}


class Capital(pydantic.BaseModel):
    capital: str = pydantic.Field(max_length=12)
    is_large: bool


def test_the_clients_own_parser_gets_its_object(client):
    answer = client.chat.completions.parse(model="demo", messages=CHAT, response_format=Capital, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Capital)


def test_the_native_protocol_has_every_kind_of_structured_output(server):
    for output_format, regex in (
        ({"guided_choice": ["Paris", "London"]}, "Paris|London"),
        ({"guided_regex": "[A-Z][a-z]{2,9}!"}, "[A-Z][a-z]{2,9}!"),
        ({"guided_grammar": 'root ::= "(" root ")" | [0-9]'}, r"\(*[0-9]\)*"),
        ({"response_format": {"type": "json_object"}}, r"\{(.|\n)*"),
    ):
        status, answer = post(
            server, "/v1/chat/completions", {"messages": CHAT, "req_id": "f", "max_dec_len": 60, **output_format}
        )
        assert status == 200
        assert re.fullmatch(regex, answer["result"]), answer["result"]


def test_grpc_has_the_same_structured_output_with_several_answers(server):
    with GrpcStream(server) as stream:
        stream.ask({"text": "A capital?", "req_id": "g", "guided_choice": ["Paris", "Rome"], "n": 3, "max_dec_len": 9})
        texts = {}
        while len(texts) < 3:
            [answer] = stream.next()
            if answer.get("finish_reason"):
                texts[answer["index"]] = answer["tokens_all"], answer["finish_reason"]
        assert set(texts.values()) <= {("Paris", "stop"), ("Rome", "stop")}


HOSTILE = {
    "guided_json": {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(12)]},
    "guided_regex": "a(?=b)",
    "guided_grammar": "start: " + "(" * 20000,
    "response_format": {"type": "json_object", "schema": {"enum": ["\ud800"]}},
}


def test_a_hostile_grammar_gets_a_400_and_others_their_answers(server):
    good = {"messages": CHAT, "guided_choice": ["Paris", "London"], "max_dec_len": 9}
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(post, server, "/v1/chat/completions", {**good, "req_id": f"good {i}"}) for i in range(8)]
        for field, output_format in HOSTILE.items():
            body = {"messages": CHAT, "req_id": field, field: output_format}
            status, answer = post(server, "/v1/chat/completions", body)
            assert (status, answer["error_type"]) == (400, "invalid_request")
            assert f"`{field}" in answer["error_msg"]
        assert {answer.result()[1]["result"] for answer in answers} <= {"Paris", "London"}
    wait_until_idle(server)


def test_unenforced_keywords_of_a_schema_are_refused_or_reported(client):
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 3, "maxItems": 3}
    wanted = {"type": "json_schema", "json_schema": {"name": "letters", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=r"`response_format.* uniqueItems at \$;"):
        chat(client, response_format=wanted)
    wanted["json_schema"]["strict"] = False
    answer = client.chat.completions.with_raw_response.create(
        model="demo", messages=CHAT, max_tokens=60, response_format=wanted
    )
    assert answer.headers["X-Unenforced-Keywords"] == "uniqueItems at $"
    assert len(json.loads(answer.parse().choices[0].message.content)) == 3


def test_a_structural_tag_of_formats_is_kept_to_streamed_or_not(client):
    letter = {"type": "regex", "pattern": "[abc]"}
    tag = {"type": "tag", "begin": "<n>", "content": letter, "end": "</n>"}
    tree = {"type": "sequence", "elements": [{"type": "any_text", "max_chars": 40}, tag, {**tag, "begin": "<m>"}]}
    wanted = {"type": "structural_tag", "format": tree}
    for stream in (False, True):
        answer = chat(client, response_format=wanted, stream=stream)
        parts = [chunk.choices[0].delta.content for chunk in answer] if stream else [answer.choices[0].message.content]
        text = "".join(filter(None, parts))
        assert re.fullmatch(r"(?s:.{0,40})<n>[abc]</n><m>[abc]</n>", text), text


def test_an_error_in_the_schema_of_a_tool_names_the_tool(client):
    wrong = {"type": "function", "function": {"name": "broken", "parameters": {"type": "objekt"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, tools=[*TOOLS, wrong], tool_choice="required")
    message = caught.value.body["message"]
    assert message == 'The `tools` cannot be compiled: function "broken": Invalid type: objekt'


def test_structured_output_is_the_same_when_the_engine_is_killed_in_its_middle(server):
    items = {
        "type": "array",
        "items": {"type": "string", "minLength": 3, "maxLength": 9},
        "minItems": 90,
        "maxItems": 90,
    }
    body = {
        "text": "Words",
        "infer_seed": 5,
        "guided_decoding_disable_any_whitespace": True,
        "max_dec_len": 1000,
        "stream": True,
        "guided_json": items,
    }
    expected = stream_lines(server, {**body, "req_id": "before"})[-1]["tokens_all"]
    jsonschema.validate(json.loads(expected), items)
    restarts = facts(server)["num_restarts"]
    request = urllib.request.Request(
        f"{server.http_url}/v1/chat/completions", json.dumps({**body, "req_id": "killed"}).encode()
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for index, line in enumerate(response):  # noqa: B007 - the last one is looked at
            if index == 0:
                os.kill(server.pid_of("engine"), signal.SIGKILL)
    assert json.loads(line)["tokens_all"] == expected
    wait_until(lambda: facts(server)["num_restarts"] == restarts + 1)


def test_a_tool_that_must_be_called_is_called(client):
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        [answer] = chat(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).choices
        [call] = answer.message.tool_calls
        assert (call.function.name, answer.finish_reason, answer.message.content) == ("weather", "tool_calls", None)
        jsonschema.validate(json.loads(call.function.arguments), WEATHER["parameters"])


def test_a_call_that_must_be_comes_in_deltas(client):
    chunks = list(chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].function.name == "weather"
    jsonschema.validate(json.loads("".join(call.function.arguments for call in deltas)), WEATHER["parameters"])


def test_tools_that_may_be_called_leave_words_as_they_are(client):
    [answer] = chat(client, tools=TOOLS, temperature=0).choices
    assert ("Paris" in answer.message.content, answer.message.tool_calls) == (True, None)


# --- a chat in other words ------------------------------------------------------------------------------------------


def test_a_response_equals_a_chat_in_one_piece_streamed_and_with_structured_output(client):
    expected = chat(client, temperature=0).choices[0].message.content
    asked = {"model": "demo", "input": CHAT, "temperature": 0, "max_output_tokens": 200}
    whole = client.responses.create(**asked)
    assert (whole.output_text, whole.status) == (expected, "completed")
    with client.responses.stream(**asked) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert ("".join(texts), final.output_text) == (expected, expected)
    assert final.usage.output_tokens == whole.usage.output_tokens > 0
    assert isinstance(client.responses.parse(**{**asked, "text_format": Capital}).output_parsed, Capital)


def test_a_response_calls_the_tool_that_it_must(client):
    tools = [{"type": "function", **WEATHER}]
    asked = {"model": "demo", "input": CHAT, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    [call] = client.responses.create(**asked, max_output_tokens=200).output
    assert (call.type, call.name) == ("function_call", "weather")
    jsonschema.validate(json.loads(call.arguments), WEATHER["parameters"])
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history = [*CHAT, call.model_dump(exclude_none=True), result]
    assert client.responses.create(model="demo", input=history, tools=tools, max_output_tokens=20).status


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.http_url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_says_what_a_chat_does_whole_streamed_and_counted(client, claude):
    expected = chat(client, temperature=0)
    asked = {"model": "demo", "messages": CHAT, "max_tokens": 20_000, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**asked)
    assert (whole.content[0].text, whole.stop_reason) == (expected.choices[0].message.content, "end_turn")
    counted = claude.messages.count_tokens(model="demo", messages=CHAT).input_tokens
    usage = whole.usage
    assert counted == expected.usage.prompt_tokens == usage.input_tokens + usage.cache_read_input_tokens
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage.output_tokens == usage.output_tokens
    begun = [*CHAT, {"role": "assistant", "content": whole.content[0].text[:14]}]
    rest = claude.messages.create(**{**asked, "messages": begun}).content[0].text
    assert whole.content[0].text[:14] + rest == whole.content[0].text
    cut = claude.messages.create(**{**asked, "stop_sequences": ["Paris"]})
    assert (cut.stop_reason, cut.stop_sequence, "Paris" in cut.content[0].text) == ("stop_sequence", "Paris", False)


def test_a_message_uses_the_tool_that_it_must(claude):
    tools = [{"name": "weather", "description": "now", "input_schema": WEATHER["parameters"]}]
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    asked = {"model": "demo", "max_tokens": 200, "messages": CHAT, "tools": tools}
    with claude.messages.stream(**asked, tool_choice=choice) as stream:
        message = stream.get_final_message()
    [call] = message.content
    assert (call.name, message.stop_reason) == ("weather", "tool_use")
    jsonschema.validate(call.input, WEATHER["parameters"])
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [*CHAT, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(**{**asked, "messages": history}).stop_reason in ("end_turn", "max_tokens")


def test_only_allowed_tokens_are_chosen(client):
    allowed = {"allowed_token_ids": [100, 101]}
    answer = client.completions.create(model="demo", prompt="x", max_tokens=30, logprobs=0, extra_body=allowed)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (30, "length")
    assert len(set(answer.choices[0].logprobs.tokens)) <= 2
    alone = {"allowed_token_ids": [100], "ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(model="demo", prompt="x", max_tokens=30, extra_body=alone)
    assert (answer.choices[0].token_ids, answer.choices[0].finish_reason) == ([100] * 30, "length")


def test_a_file_of_requests_is_answered_and_gone_on_with(server, client, tmp_path):
    expected = chat(client, temperature=0).choices[0].message.content
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 200}
    lines = [{"custom_id": f"{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(200)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines[:100])))
    command = [sys.executable, "-c", RUN_BATCH, "in.jsonl", "out.jsonl"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SERVICE_HTTP_PORT": str(server.ports["SERVICE_HTTP_PORT"])}
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, env=env, timeout=120, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(int(each["custom_id"]) for each in answers) == list(range(200))
    texts = {each["response"]["body"]["choices"][0]["message"]["content"] for each in answers}
    assert texts == {expected}
