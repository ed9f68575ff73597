"""Messages with Anthropic's unmodified client: what reaches the model is a chat, what comes back its own objects."""

import contextlib
import json

import pytest

from engine import wire
from engine.errors import EngineUnavailable, InvalidRequest, Overloaded
from tests.pure.gateway.test_tools import CALLS
from tests.pure.gateway_fake import PATIENCE_S, FakeBackend, running

PATH = "/v1/messages"
WEATHER = {"name": "weather", "description": "now", "input_schema": {"type": "object", "properties": {}}}
TIME = {"name": "time", "input_schema": {"type": "object"}}
MESSAGES = [{"role": "user", "content": "The weather in Paris and in Rome?"}]
ASKED = {"model": "default", "max_tokens": 64, "messages": MESSAGES}
THINKS = ["<think>\nHm", ", well.\n</think>\n\n", "Sun", "ny."]
THINKING = {"type": "enabled", "budget_tokens": 1024}


@contextlib.contextmanager
def a_client(gateway, key="any"):
    import anthropic  # late, as it takes a second of every test worker

    http_client = anthropic.DefaultHttpxClient(verify=False)  # reads no certificates, which would take 25 ms
    with anthropic.Anthropic(
        base_url=gateway.url, api_key=key, max_retries=0, timeout=PATIENCE_S, http_client=http_client
    ) as client:
        yield client


def ask(backend, settings=None, **fields):
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", **(settings or {})}
    with running(backend, **settings) as gateway, a_client(gateway) as client:
        answer = client.messages.create(**{**ASKED, **fields})
        return list(answer) if fields.get("stream") else answer


def sent(settings=None, **fields):
    backend = FakeBackend("a")
    ask(backend, settings, **fields)
    [body] = backend.bodies
    return body


@pytest.mark.slow
def test_an_answer_has_its_words_and_what_it_took():
    message = ask(FakeBackend("Sun", "ny."))
    assert [(block.type, block.text) for block in message.content] == [("text", "Sunny.")]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (1, 4, 2)
    assert message.id.startswith("msg_")


@pytest.mark.parametrize(
    ("ended", "reasons"),
    [
        ({"finish_reason": "length"}, ("max_tokens", None)),
        ({"stop_reason": "END"}, ("stop_sequence", "END")),
    ],
)
def test_the_finish_reason_is_returned_in_one_piece_and_streamed(ended, reasons):
    message = ask(FakeBackend("Sun", **ended))
    assert (message.stop_reason, message.stop_sequence) == reasons
    [delta] = [event.delta for event in ask(FakeBackend("Sun", **ended), stream=True) if event.type == "message_delta"]
    assert (delta.stop_reason, delta.stop_sequence) == reasons


def test_thoughts_and_calls_are_blocks_of_their_own():
    message = ask(FakeBackend(*THINKS[:2], *CALLS), tools=[WEATHER, TIME], thinking=THINKING)
    thought, words, weather, time = message.content
    assert (thought.type, thought.thinking, words.text) == ("thinking", "Hm, well.", "Let me see.")
    assert (weather.type, weather.name, weather.input) == ("tool_use", "weather", {"city": "Paris"})
    assert (time.name, time.input, message.stop_reason) == ("time", {}, "tool_use")
    assert weather.id.startswith("toolu_") and weather.id != time.id


def test_a_truncated_call_is_returned_as_it_is():
    message = ask(FakeBackend(*CALLS[:4], finish_reason="length"), tools=[WEATHER])
    assert (message.content[1].input, message.stop_reason) == ({"INVALID_JSON": '{"city": "Pa'}, "max_tokens")


def test_the_clients_own_helper_makes_of_a_stream_what_comes_in_one_piece():
    script = [*THINKS[:2], *CALLS]
    fields = {**ASKED, "tools": [WEATHER, TIME], "thinking": THINKING}
    whole = ask(FakeBackend(*script), **fields)
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with running(FakeBackend(*script), **settings) as gateway, a_client(gateway) as client:
        with client.messages.stream(**fields) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4

    def said(message):
        keep = ("type", "text", "thinking", "name", "input")
        return [{name: getattr(block, name, None) for name in keep} for block in message.content]

    assert said(final) == said(whole)
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)


def test_thoughts_come_only_when_they_are_asked_for():
    for parser, kwargs in (("qwen3", {"enable_thinking": False}), ("deepseek_r1", {})):
        settings = {"reasoning_parser": parser}
        assert sent(settings).get("chat_template_kwargs", {}) == kwargs
        assert sent(settings, thinking=THINKING).get("chat_template_kwargs", {}) == {}
    assert sent({"reasoning_parser": "qwen3"}, thinking=THINKING)["reasoning_max_tokens"] == 1024
    assert "reasoning_max_tokens" not in sent({"reasoning_parser": "none"}, thinking=THINKING)
    settings = {"reasoning_parser": "deepseek_r1"}  # its template cannot leave them out
    assert [block.text for block in ask(FakeBackend("Hm", *THINKS[1:]), settings).content] == ["Sunny."]
    assert [block.type for block in ask(FakeBackend(*THINKS), settings, thinking={"type": "adaptive"}).content] == [
        "thinking",
        "text",
    ]


def test_a_conversation_is_a_chat_to_the_model():
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm", "signature": ""}, {"type": "text", "text": "Hi"}, call],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
        {"role": "assistant", "content": [{**call, "id": "t2"}]},
        {"role": "user", "content": [{**result, "tool_use_id": "t2", "content": "rain"}]},
    ]
    body = sent(messages=conversation, system=[{"type": "text", "text": "Be short."}], tools=[WEATHER])
    system, hello, assistant, tool, now, again, rain = body["messages"]
    assert (system["role"], system["content"]) == ("system", [{"type": "text", "text": "Be short."}])
    assert hello["content"] == [{"type": "text", "text": "Hello"}]
    assert (assistant["reasoning_content"], assistant["tool_calls"][0]["function"]["arguments"]) == (
        "Hm",
        {"city": "Rome"},
    )
    assert (tool["role"], tool["tool_call_id"], now["content"][0]["text"]) == ("tool", "t1", "And now?")
    assert (again["role"], rain["content"]) == ("assistant", "rain")
    function = {"name": "weather", "description": "now", "parameters": WEATHER["input_schema"]}
    assert body["chat_template_kwargs"]["tools"] == [{"type": "function", "function": function}]
    assert sent(system="Be short.")["messages"][0] == {"role": "system", "content": "Be short."}


def test_images_are_parts_of_a_chat_and_keep_their_places():
    inline = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://cat.example/b.png"}}
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"}, linked]}
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, inline]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, linked]},
    ]
    body = sent(messages=conversation, system="Be short.", tools=[WEATHER])
    parts = list(wire.image_parts(body["messages"]))
    assert [(part["image_url"]["url"], part["path"]) for part in parts] == [
        ("data:image/png;base64,aGk=", "[0].content[1].source"),
        ("https://cat.example/b.png", "[2].content[0].content[1].source"),
        ("https://cat.example/b.png", "[2].content[1].source"),
    ]
    wire.parse_request({**body, "req_id": "a"})


def test_fields_reach_the_model_as_those_of_a_chat_do():
    output_format = {"type": "json_schema", "schema": {"type": "object"}}
    body = sent(
        {"reasoning_parser": "none"},
        **{"stop_sequences": ["x"], "system": "s", "max_tokens": 10**9},
        **{"output_config": {"format": output_format, "effort": "low"}},
        extra_body={"seed": 3, "temperature": 0.5, "top_k": 5},
    )
    assert {**body, "stop": ["x"], "temperature": 0.5, "top_k": 5, "max_tokens": 10**9, "seed": 3} == body
    assert body["cut_max_dec_len"] is True
    assert body["response_format"]["json_schema"]["schema"] == output_format["schema"]
    assert sent(extra_body={"output_format": output_format})["response_format"] == body["response_format"]
    assert body["chat_template_kwargs"] == {"reasoning_effort": "low"}
    prefilled = sent({"reasoning_parser": "none"}, messages=[*MESSAGES, {"role": "assistant", "content": "It is"}])
    assert prefilled["chat_template_kwargs"] == {"continue_final_message": True}
    for choice, word in (({"type": "any"}, "weather"), ({"type": "tool", "name": "time"}, "time")):
        body = sent(tools=[WEATHER, TIME], tool_choice={**choice, "disable_parallel_tool_use": True})
        assert word in body["guided_grammar"] and "{0,15}" not in body["guided_grammar"]
    assert "tools" not in sent(tools=[WEATHER], tool_choice={"type": "none"}).get("chat_template_kwargs", {})


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "messages[0].content[0].source",
        ),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"temperature": "hot"}, "temperature"),
        ({"temprature": 1}, "temperature"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"tool_choice": {"type": "never"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto"}}, "tool_choice"),
        ({"thinking": {"type": "deep"}}, "thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
        ({"output_config": {"formats": {"type": "json_schema"}}}, "format"),
        ({"container": "c"}, "container"),
        ({"max_completion_tokens": 5}, "max_tokens"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].input"),
        ({"system": 5}, "system"),
        ({"tools": [{"name": 5}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, 'tools` has more than one with the name "weather"'),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"best_of": 2}, "best_of"),
        ({"instructions": "Be short."}, "system"),
        ({"output_format": {"type": "xml"}}, "output_format"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"output_format": 5}, "output_format"),
        ({"thinking": {"type": "adaptive", "budget_tokens": -1}}, "thinking.budget_tokens"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": "x"}},
            "tool_choice.disab",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}},
            "tool_choice` must name one of the",
        ),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]},
            "messages[0].content[0].name",
        ),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"tools": [{**WEATHER, "strict": "no"}]}, "tools[0].strict"),
        ({"tools": [{**WEATHER, "description": 5}]}, "tools[0].description"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}, "strict": "no"}}},
            "output_config.format.strict",
        ),
    ],
)
def test_unsupported_fields_are_refused_by_the_name_that_the_client_knows(fields, name):
    backend = FakeBackend("a")
    with running(backend, tool_call_parser="hermes") as gateway:
        status, answer = gateway.refused(PATH, {**ASKED, **fields})
    assert (status, set(answer), answer["type"], backend.bodies) == (400, {"type", "error"}, "error", [])
    assert answer["error"]["type"] == "invalid_request_error"
    assert f"`{name}" in answer["error"]["message"] or f"{name}[]" in answer["error"]["message"]


def test_errors_are_the_clients_exceptions_before_the_first_event_and_after_it():
    import anthropic  # late, as it takes a second of every test worker

    for error, kind in (
        (InvalidRequest("{field} is {value}", field="stop_sequences", value=5), anthropic.BadRequestError),
        (Overloaded("full"), anthropic.RateLimitError),
        (EngineUnavailable("gone"), anthropic.InternalServerError),
    ):
        for fields in ({}, {"stream": True}):
            with pytest.raises(kind) as caught:
                ask(FakeBackend(error), **fields)
            assert str(error) in caught.value.body["error"]["message"]
    events = b""
    with running(FakeBackend("hi", EngineUnavailable("gone"))) as gateway, a_client(gateway) as client:
        with pytest.raises(anthropic.APIStatusError, match="gone"):
            list(client.messages.create(**ASKED, stream=True))
        events = b"".join(gateway.stream(PATH, {**ASKED, "stream": True}))
    assert json.loads(events.decode().strip().rpartition("data: ")[2])["error"]["type"] == "overloaded_error"


def test_an_error_of_the_model_about_a_grammar_blames_the_field_that_has_it():
    output_format = {"type": "json_schema", "schema": {"type": "object"}}
    for name, fields in (("output_config", {"format": output_format}), ("output_format", output_format)):
        backend = FakeBackend(InvalidRequest("`{field}` cannot be compiled", field="response_format"))
        with running(backend) as gateway:
            _, answer = gateway.refused(PATH, {**ASKED, name: fields})
        assert answer["error"]["message"] == f"`{name}` cannot be compiled"


def test_keys_are_taken_from_the_header_that_the_client_sends():
    import anthropic  # late, as it takes a second of every test worker

    with running(FakeBackend("hi"), api_key="secret") as gateway:
        with a_client(gateway, "secret") as client:
            assert client.messages.create(**ASKED).content[0].text == "hi"
            assert client.messages.count_tokens(model="m", messages=MESSAGES).input_tokens == 0
        for key, status in (("secret", 200), ("wrong", 401)):
            assert gateway.send("POST", PATH, ASKED, {"x-api-key": key})[0] == status
        with a_client(gateway, "wrong") as client:
            counting = {"model": "m", "messages": MESSAGES}
            for call, fields in ((client.messages.create, ASKED), (client.messages.count_tokens, counting)):
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    call(**fields)
                assert caught.value.body["error"]["type"] == "authentication_error"


def test_tokens_are_counted_of_the_chat_that_would_be_asked():
    import anthropic  # late, as it takes a second of every test worker

    backend = FakeBackend()
    with running(backend) as gateway, a_client(gateway) as client:
        fields = {"model": "m", "system": "s", "tools": [WEATHER], "messages": MESSAGES}
        assert client.messages.count_tokens(**fields).input_tokens == 0  # the fake's template
        with pytest.raises(anthropic.BadRequestError, match="image"):
            client.messages.count_tokens(model="m", messages=[{"role": "user", "content": [{"type": "image"}]}])
    [question] = [body["tokenize"] for body in backend.bodies]
    assert [each["role"] for each in question["messages"]] == ["system", "user"]
    assert question["tools"][0]["function"]["name"] == "weather"


def test_a_path_that_is_not_served_is_refused_in_the_form_of_the_api():
    import anthropic  # late, as it takes a second of every test worker

    with running(FakeBackend()) as gateway, a_client(gateway) as client:
        with pytest.raises(anthropic.NotFoundError, match="no such path") as caught:
            client.messages.batches.list()
        assert caught.value.body["error"]["type"] == "not_found_error" and caught.value.body["type"] == "error"
