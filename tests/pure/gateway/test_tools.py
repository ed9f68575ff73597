"""Tools and thoughts over OpenAI's chat completions, with the unmodified client."""

import contextlib
import json
from functools import partial

import pytest

from engine.errors import ConfigError, InvalidRequest
from engine.grammars.pool import GrammarPool
from engine.settings.config import Config
from engine.text.tokenizer import Tokenizer
from gateway.app import make_app
from gateway.openai.output_syntax import FORMATS, NO_SYNTAX, output_syntax_of
from tests.byte_tokenizer import write_tokenizer
from tests.pure.gateway.test_openai_output_parser import read
from tests.pure.gateway_fake import FakeBackend, openai_client, running
from tests.pure.guided import VOCAB_SIZE, Guided, a_request

CHAT = "/v1/chat/completions"
KINDS = ("reasoning_content", "content")
MESSAGES = [{"role": "user", "content": "The weather in Paris and in Rome?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
ASKED = {"model": "default", "messages": MESSAGES, "tools": [WEATHER, TIME]}
CALLS = ["Let me", " see.\n<tool", '_call>\n{"name": "weather", "argu', 'ments": {"city": "Pa', 'ris"}}\n</tool_call>']
CALLS += ['\n<tool_call>\n{"name": "time", "arguments": {}}\n', "</tool_call>"]


def ask(backend, settings=None, **fields):
    with running(backend, **{"tool_call_parser": "hermes", **(settings or {})}) as gateway:
        with openai_client(gateway) as client:
            answer = client.chat.completions.create(**{**ASKED, **fields})
            return list(answer) if fields.get("stream") else answer.choices[0]


def pairs(calls):
    return [(call.function.name, call.function.arguments) for call in calls]


def test_calls_come_whole():
    backend = FakeBackend(*CALLS)
    choice = ask(backend)
    assert pairs(choice.message.tool_calls) == [("weather", '{"city": "Paris"}'), ("time", "{}")]
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert all(call.type == "function" and call.id.startswith("call_") for call in choice.message.tool_calls)
    [body] = backend.bodies
    assert body["chat_template_kwargs"] == {"tools": [WEATHER, TIME]}
    assert "guided_grammar" not in body


def test_calls_come_in_deltas():
    chunks = [chunk.choices[0] for chunk in ask(FakeBackend(*CALLS), stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see."
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in deltas if call.id] == [(0, "weather"), (1, "time")]
    arguments = ["".join(call.function.arguments for call in deltas if call.index == index) for index in (0, 1)]
    assert arguments == ['{"city": "Paris"}', "{}"]
    assert len([call for call in deltas if call.index == 0]) > 1  # not held back until they are whole
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


def test_thoughts_are_left_out_when_they_are_not_wanted():
    script = ("<think>Hm", "</think>\n", "Sunny.")
    for asked, thought in ((True, "Hm"), (False, None)):
        choice = ask(
            FakeBackend(*script), {"reasoning_parser": "qwen3"}, tools=[], extra_body={"include_reasoning": asked}
        )
        assert (choice.message.content, getattr(choice.message, "reasoning_content", None)) == ("Sunny.", thought)


def test_the_clients_own_helper_understands_the_stream():
    with running(FakeBackend(*CALLS), tool_call_parser="hermes") as gateway, openai_client(gateway) as client:
        with client.chat.completions.stream(**ASKED) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
    assert pairs(message.tool_calls) == [("weather", '{"city": "Paris"}'), ("time", "{}")]


def test_one_call_only_when_they_shall_not_be_parallel():
    assert pairs(ask(FakeBackend(*CALLS), parallel_tool_calls=False).message.tool_calls) == [
        ("weather", '{"city": "Paris"}')
    ]


def test_an_answer_without_calls_is_as_usual():
    choice = ask(FakeBackend("Hello", " there <tool"))
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
        "Hello there <tool",
        None,
        "stop",
    )


def test_an_answer_that_was_cut_short_says_so():
    choice = ask(FakeBackend(*CALLS[:4], finish_reason="length"))
    assert (pairs(choice.message.tool_calls), choice.finish_reason) == ([("weather", '{"city": "Pa')], "length")


def test_without_tools_or_with_none_to_be_chosen_calls_are_words():
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        backend = FakeBackend(*CALLS)
        choice = ask(backend, **fields)
        assert (choice.message.content, choice.message.tool_calls) == ("".join(CALLS), None)
        assert "chat_template_kwargs" not in backend.bodies[0]


def test_arguments_in_the_history_are_objects_to_the_template():
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]
    backend = FakeBackend("ok")
    ask(backend, messages=[*MESSAGES, *history])
    sent = backend.bodies[0]["messages"][1]
    assert (sent["content"], sent["tool_calls"][0]["function"]["arguments"]) == ("", {"city": "Rome"})


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_is_one_whatever_the_model_thinks(tokenizer, name, choice):
    """The model gets a grammar in its own format, and text that matches it is parsed as calls."""
    backend = FakeBackend("{}")
    ask(backend, {"tool_call_parser": name}, tool_choice=choice)
    guided = Guided(tokenizer)
    names = set()
    for seed in range(8):
        grammar = backend.bodies[0]["guided_grammar"]
        text = guided.run(a_request(f"{seed}", "guided_grammar", grammar, seed=seed, temperature=5.0))
        content, _, calls = read(text, calls=FORMATS[name], is_forced=True)
        assert content == ""
        assert len(calls) == 1 if choice != "required" else calls
        for function, arguments in calls:
            assert set(json.loads(arguments)) == ({"city"} if function == "weather" else set())
            names.add(function)
    assert names == ({"weather", "time"} if choice == "required" else {"weather"})


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_must_be_is_the_only_one_if_they_shall_not_be_parallel(tokenizer, name):
    backend = FakeBackend("{}")
    ask(backend, {"tool_call_parser": name}, tool_choice="required", parallel_tool_calls=False)
    guided = Guided(tokenizer)
    for seed in range(8):
        text = guided.run(a_request(f"{seed}", "guided_grammar", backend.bodies[0]["guided_grammar"], seed=seed))
        assert len(read(text, calls=FORMATS[name], is_forced=True)[2]) == 1


SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}}
CITY = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def tokenizer_and_grammars(tmp_path_factory):
    """Return a tokenizer with a special token for Mistral's calls, and grammar workers that have loaded it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["additional_special_tokens"] = ["[TOOL_CALLS]"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with contextlib.closing(GrammarPool(partial(Tokenizer.load, folder), VOCAB_SIZE)) as grammars:
        yield Tokenizer.load(folder), grammars


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_schema_of_the_text_leaves_room_for_calls(tokenizer_and_grammars, name):
    """Agents send tools and the format of their last answer with every request."""
    backend, settings = FakeBackend("{}"), {"tool_call_parser": name}
    unchecked = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    odd = {"type": "function", "function": {"name": "odd", "parameters": unchecked}}
    asked = {"response_format": CITY, "tools": [WEATHER, TIME, odd]}  # what is not checked is not refused
    ask(backend, settings, **asked, parallel_tool_calls=False)
    [body] = backend.bodies
    assert body["response_format"] == {"type": "text"} and len(body["chat_template_kwargs"]["tools"]) == 3
    reported, grammar = set(), body["guided_grammar"]
    tokenizer, grammars = tokenizer_and_grammars
    guided = Guided(tokenizer, grammars=grammars)
    for seed in range(16):
        text = guided.run(a_request(f"{seed}", "guided_grammar", grammar, seed=seed, temperature=5.0))
        content, _, calls = read(text, calls=FORMATS[name], names=["weather", "time", "odd"])
        assert bool(content) != bool(calls)
        reported |= {name for name, _ in calls} or {content}
    assert {"weather", "time"} < reported and reported - {"weather", "time", "odd"} <= {"{}", '{"city": "Rome"}'}
    for fields in ({"response_format": {"type": "text"}}, {"response_format": CITY, "tools": []}):
        ask(backend, settings, **fields)
        assert "guided_grammar" not in backend.bodies[-1]


def test_words_that_look_like_a_call_of_no_tool_are_words_and_come_as_they_are_written():
    """Llama's calls have no marker in front of them."""
    for script in (['{"name": "Rome",', ' "parameters": {}}'], ['{"city":', ' "Rome"}']):
        backend = FakeBackend(*script)
        assert ask(backend, {"tool_call_parser": "llama3_json"}).message.content == "".join(script)
        chunks = ask(backend, {"tool_call_parser": "llama3_json"}, stream=True)
        assert [content for chunk in chunks if (content := chunk.choices[0].delta.content)] == script


def test_a_text_schema_has_no_effect_if_a_call_is_forced():
    backend = FakeBackend("{}")
    ask(backend, response_format=CITY, tool_choice="required")
    assert "Rome" not in backend.bodies[0]["guided_grammar"] and backend.bodies[0]["response_format"]["type"] == "text"


def test_tools_that_are_allowed_are_the_only_ones():
    def allowed(mode, *names):
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}

    backend = FakeBackend("{}")
    for mode in ("auto", "required"):
        ask(backend, **allowed(mode, "time"))
        body = backend.bodies[-1]
        assert body["chat_template_kwargs"] == {"tools": [TIME]}
        assert ("guided_grammar" in body) == (mode == "required")
    with running(FakeBackend()) as gateway:
        for wrong in (allowed("none", "time"), allowed("auto"), allowed("auto", "time", "other")):
            status, answer = gateway.refused(CHAT, {**ASKED, **wrong})
            assert (status, answer["error"]["param"]) == (400, "tool_choice")
            assert "a `mode` of [auto, required] and name some of the `tools`" in answer["error"]["message"]


def test_forced_arguments_are_those_that_the_tool_names():
    backend = FakeBackend("{}")
    open_one = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "null"}}}}}
    ask(backend, tools=[open_one], tool_choice="required")
    assert '"additionalProperties": false' in backend.bodies[0]["guided_grammar"]


def test_without_a_known_format_calls_can_still_be_forced():
    backend = FakeBackend('{"name": "weather", "parameters": {"city": "Rome"}}')
    choice = ask(backend, {"tool_call_parser": "none"}, tool_choice="required")
    assert pairs(choice.message.tool_calls) == [("weather", '{"city": "Rome"}')]
    assert "weather" in backend.bodies[0]["guided_grammar"]


def test_an_error_in_the_grammar_of_a_forced_call_blames_the_tools():
    with running(FakeBackend(InvalidRequest("The `{field}` is", field="guided_grammar"))) as gateway:
        status, answer = gateway.refused(CHAT, {**ASKED, "tool_choice": "required"})
    assert (status, answer["error"]["param"], answer["error"]["message"]) == (400, "tools", "The `tools` is")


def of_unique(**more):
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    return {"type": "function", "function": {"name": "w", "parameters": parameters, **more}}


def test_unenforced_keywords_of_a_forced_call_are_refused_by_its_function_or_reported():
    asked = {**ASKED, "tools": [TIME, of_unique()], "tool_choice": "required"}
    with running(FakeBackend("{}"), tool_call_parser="hermes") as gateway:
        status, answer = gateway.refused(CHAT, asked)
        assert (status, answer["error"]["param"]) == (400, "tools")
        says = 'Function "w": The `tools[].function.parameters` has keywords that cannot be enforced'
        assert answer["error"]["message"].startswith(says)
        assert "uniqueItems at $.properties.a;" in answer["error"]["message"]
        allowed = {**asked, "tools": [TIME, of_unique(strict=False)]}
        status, headers, _ = gateway.send("POST", CHAT, allowed)
        assert (status, headers["X-Unenforced-Keywords"]) == (200, '"w": uniqueItems at $.properties.a')


def test_unenforced_keywords_of_an_optional_call_are_reported_unless_the_function_is_strict():
    asked = {**ASKED, "response_format": CITY}
    with running(FakeBackend("{}"), tool_call_parser="hermes") as gateway:
        status, headers, _ = gateway.send("POST", CHAT, {**asked, "tools": [of_unique()]})
        assert (status, headers["X-Unenforced-Keywords"]) == (200, '"w": uniqueItems at $.properties.a')
        status, answer = gateway.refused(CHAT, {**asked, "tools": [of_unique(strict=True)]})
        assert (status, 'Function "w"' in answer["error"]["message"]) == (400, True)
        # Nothing is forced.
        status, headers, _ = gateway.send("POST", CHAT, {**ASKED, "tools": [of_unique(strict=True)]})
        assert (status, "X-Unenforced-Keywords" in headers) == (200, False)


SAID = {"messages": MESSAGES}


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("strict", [None, False])
def test_a_schema_that_is_not_strict_is_accepted_and_unenforced_keywords_are_reported_in_every_protocol(path, strict):
    schema = {"schema": {"items": {"not": {"type": "null"}}}, **({} if strict is None else {"strict": strict})}
    output_format = {"type": "json_schema", "name": "x", **schema}
    asked = {
        CHAT: {**SAID, "response_format": {"type": "json_schema", "json_schema": schema}},
        "/v1/responses": {"input": "hi", "text": {"format": output_format}},
        "/v1/messages": {**SAID, "max_tokens": 9, "output_config": {"format": output_format}},
    }[path]
    with running(FakeBackend("[]")) as gateway:
        status, headers, _ = gateway.send("POST", path, asked)
    expected = (400, None) if strict is None else (200, "not at $.items")
    assert (status, headers.get("X-Unenforced-Keywords")) == expected


def test_a_native_answer_tells_what_is_not_enforced():
    output_format = {"type": "json_schema", "json_schema": {"schema": {"not": {"type": "null"}}, "strict": False}}
    with running(FakeBackend("[]")) as gateway:
        status, headers, _ = gateway.send("POST", CHAT, {"text": "hi", "response_format": output_format})
    assert (status, headers["X-Unenforced-Keywords"]) == (200, "not at $")


def test_an_error_in_a_schema_that_the_library_finds_names_the_function_and_no_rule(tokenizer):
    guided, backend = Guided(tokenizer), FakeBackend("{}")
    wrong = {"type": "function", "function": {"name": 'a "b"', "parameters": {"type": "objekt"}}}
    ask(backend, tools=[TIME, wrong], tool_choice="required")
    guided.run(a_request("a", "guided_grammar", backend.bodies[0]["guided_grammar"]))
    assert guided.errors["a"].message({"guided_grammar": "tools"}) == (
        'The `tools` cannot be compiled: function "a \\"b\\"": Invalid type: objekt'
    )


# Thoughts

THOUGHT = ["<thi", "nk>\nParis is", " in France.\n</", "think>\n\nPar", "is."]


@pytest.mark.parametrize(
    ("parser", "script"),
    [
        ("qwen3", THOUGHT),
        ("deepseek_r1", ["Paris is in France.\n</", *THOUGHT[3:]]),
        ("ernie", ["Paris is in France.\n</", "think>\n\n\n<resp", "onse>\nParis.", "\n</response>\n"]),
    ],
)
def test_reasoning_is_separated(parser, script):
    choice = ask(FakeBackend(*script), {"reasoning_parser": parser}, tools=[])
    assert (choice.message.reasoning_content, choice.message.content) == ("Paris is in France.", "Paris.")
    chunks = ask(FakeBackend(*script), {"reasoning_parser": parser}, tools=[], stream=True)
    deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Paris is in France."
    assert "".join(delta.get("content", "") for delta in deltas) == "Paris."


def test_without_a_parser_or_a_thought_all_is_content():
    assert ask(FakeBackend(*THOUGHT), tools=[]).message.content == "".join(THOUGHT)
    backend = FakeBackend("It is", " Paris.")
    backend.reasoning = "never"
    assert ask(backend, {"reasoning_parser": "deepseek_r1"}, tools=[]).message.content == "It is Paris."


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("thought", "script", "reported"),
    [
        ("does", ["Paris", "?\n</th", "ink>\n\nParis."], ("Paris?", "Paris.")),
        ("may", ["Paris", "."], ("", "Paris.")),
        ("may", ["<think>Paris?</think>", "Paris."], ("Paris?", "Paris.")),
        ("never", ["Paris", "."], ("", "Paris.")),
    ],
)
def test_whether_a_model_thinks_is_what_it_knows_of_the_prompt_whatever_was_asked(
    parser, thought, script, reported, stream
):
    """A template may open a thought although the client wants none, or close it because of a flag of its own."""
    for asked in ({}, {"enable_thinking": False}, {"reasoning_effort": "none"}):
        backend = FakeBackend(*script)
        backend.reasoning = thought
        settings = {"reasoning_parser": parser}
        answer = ask(backend, settings, tools=[], stream=stream, n=2, extra_body=asked)
        if stream:
            parts = [chunk.choices[0].delta.to_dict() for chunk in answer if chunk.choices[0].index == 1]
        else:
            parts = [answer.message.to_dict()]
        assert tuple("".join(part.get(kind) or "" for part in parts) for kind in KINDS) == reported


# What the model's files say

TEMPLATES = {
    "hermes": "{% if tools %}<tools>{{ tools }}</tools> answer in <tool_call></tool_call>{% endif %}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}{{ '[TOOL_CALLS]' }}",
    "deepseek": "{% if tools %}{{ tools }}{% endif %}{{ '<｜tool▁calls▁begin｜>' }}",
    "llama3_json": '{% if tools %}{{ \'Respond in the format {"name": function name, "parameters": \' }}{% endif %}',
    "none": "{{ messages }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "a list"])
def test_the_chat_template_says_how_calls_are_written(tmp_path, name, place):
    template = TEMPLATES[name]
    if place.endswith(".jinja"):
        (tmp_path / place).write_text(template)
    else:
        listed = [{"name": "default", "template": ""}, {"name": "tool_use", "template": template}]
        config = {"chat_template": listed if place == "a list" else template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert output_syntax_of(Config(model_dir=str(tmp_path))).calls == FORMATS.get(name)


def test_a_file_may_say_how_calls_are_written(tmp_path):
    plugin = tmp_path / "plain.py"
    plugin.write_text("from gateway.openai.output_syntax import ToolCallFormat as F\nFORMAT = F('CALL:', ';')\n")
    choice = ask(FakeBackend('CALL: {"name": "time"};'), {"tool_call_parser": str(plugin)})
    assert pairs(choice.message.tool_calls) == [("time", "{}")]
    for text, why in (("FORMAT = 5", "its FORMAT must be a ToolCallFormat, it is int"), ("1 / 0", "ZeroDivisionError")):
        wrong = tmp_path / f"{len(text)}.py"
        wrong.write_text(text)
        config = Config.from_env({"TOOL_CALL_PARSER": str(wrong)})
        with pytest.raises(ConfigError, match=why):
            make_app(FakeBackend(), config)
    with pytest.raises(ConfigError, match="TOOL_CALL_PARSER is 'hermess', it must be one of: auto, none, hermes"):
        Config.from_env({"TOOL_CALL_PARSER": "hermess"})


def test_a_model_without_known_files_has_no_output_syntax(tmp_path):
    assert output_syntax_of(Config(model_dir=str(tmp_path))) == NO_SYNTAX
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert output_syntax_of(Config(model_dir=str(tmp_path), max_seq_len=9)) == NO_SYNTAX
