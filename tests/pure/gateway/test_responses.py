"""Responses with OpenAI's unmodified client: what reaches the model is a chat, what comes back its own objects."""

import json

import openai
import pydantic
import pytest

from engine import wire
from engine.errors import DuplicateRequest, EngineUnavailable, InvalidRequest, PromptTooLong
from engine.wire import StoredResponse
from tests.pure.gateway.test_tools import CALLS
from tests.pure.gateway_fake import FakeBackend, openai_client, running

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": True}
TIME = {"type": "function", "name": "time"}
ASKED = {"model": "default", "input": "The weather in Paris and in Rome?"}
WITH_TOOLS = {**ASKED, "tools": [WEATHER, TIME]}
THINKS = ["<think>\nHm", ", well.\n</think>\n\n", "Sun", "ny."]


def ask(backend, settings=None, **fields):
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", **(settings or {})}
    with running(backend, **settings) as gateway, openai_client(gateway) as client:
        answer = client.responses.create(**{**ASKED, **fields})
        return list(answer) if fields.get("stream") else answer


def sent(**fields):
    backend = FakeBackend("a")
    ask(backend, **fields)
    [body] = backend.bodies
    return body


@pytest.mark.slow
def test_an_answer_has_its_words_and_what_it_took():
    response = ask(FakeBackend("Sun", "ny."), instructions="Be short.", metadata={"a": "b"}, max_output_tokens=9)
    assert (response.output_text, response.status, response.error) == ("Sunny.", "completed", None)
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Be short.", {"a": "b"}, 9)
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (5, 2, 7)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (4, 0)
    assert response.id.startswith("resp_") and response.output[0].id.startswith("msg_")


def test_an_answer_that_was_cut_short_is_incomplete():
    response = ask(FakeBackend("Sun", finish_reason="length"))
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    events = ask(FakeBackend("Sun", finish_reason="length"), stream=True)
    assert (events[-1].type, events[-1].response.output_text) == ("response.incomplete", "Sun")


def test_thoughts_and_calls_are_items_of_their_own():
    response = ask(FakeBackend(*THINKS[:2], *CALLS), tools=[WEATHER, TIME])
    thought, words, weather, time = response.output
    assert (thought.type, thought.content[0].text, words.content[0].text) == ("reasoning", "Hm, well.", "Let me see.")
    assert (weather.type, weather.name, weather.arguments) == ("function_call", "weather", '{"city": "Paris"}')
    assert (time.name, time.arguments) == ("time", "{}")
    assert weather.call_id.startswith("call_") and weather.call_id != time.call_id
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    all_at_once = ask(FakeBackend("<think>Hm</think>Sunny."))
    assert [each.type for each in all_at_once.output] == ["reasoning", "message"]
    assert all_at_once.usage.output_tokens_details.reasoning_tokens == 1
    silent = ask(FakeBackend(*THINKS), extra_body={"include_reasoning": False}).output
    assert [each.type for each in silent] == ["message"]
    assert [each.name for each in ask(FakeBackend(*CALLS), tools=[WEATHER], parallel_tool_calls=False).output[1:]] == [
        "weather"
    ]


@pytest.mark.slow
def test_a_stream_grows_into_the_answer_in_one_piece():
    """Each event extends what the previous ones have begun, in the order that the client's own helper requires."""
    script = [*THINKS[:2], *CALLS]
    whole = ask(FakeBackend(*script), tools=[WEATHER, TIME])
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with running(FakeBackend(*script), **settings) as gateway, openai_client(gateway) as client:
        with client.responses.stream(**WITH_TOOLS) as stream:
            events = list(stream)
            final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"] and kinds[-1] == "completed"
    for kind, text in (("reasoning_text", "Hm, well."), ("output_text", "Let me see.")):
        assert "".join(event.delta for event in events if event.type == f"response.{kind}.delta") == text
        assert [event.text for event in events if event.type == f"response.{kind}.done"] == [text]
    arguments = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert arguments == ['{"city": "Paris"}', "{}"]

    def said(response):
        keep = ("type", "name", "arguments", "status")
        return [
            ([getattr(item, name, None) for name in keep], [part.text for part in getattr(item, "content", None) or ()])
            for item in response.output
        ]

    assert said(final) == said(whole)
    assert final.usage == whole.usage


def test_an_empty_answer_has_an_empty_message():
    assert ask(FakeBackend()).output_text == ""
    assert ask(FakeBackend(), stream=True)[-1].response.output[0].content[0].text == ""


class Capital(pydantic.BaseModel):
    name: str


def test_the_clients_own_parser_gets_its_object_and_the_model_the_schema():
    backend = FakeBackend('{"name":', '"Paris"}')
    with running(backend) as gateway, openai_client(gateway) as client:
        parsed = client.responses.parse(**ASKED, text_format=Capital).output_parsed
    assert parsed == Capital(name="Paris")
    output_format = backend.bodies[0]["response_format"]
    assert output_format["type"] == "json_schema" and "name" in output_format["json_schema"]["schema"]["properties"]


def test_a_conversation_is_a_chat_to_the_model():
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
    conversation = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi", "annotations": []}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "user", "content": "Thanks"},
    ]
    body = sent(input=conversation, instructions="Be short.", tools=[WEATHER])
    system, developer, user, assistant, tool, thanks = body["messages"]
    assert [each["role"] for each in body["messages"]] == ["system", "system", "user", "assistant", "tool", "user"]
    assert (system["content"], developer["content"], thanks["content"]) == ("Be short.", "Be kind.", "Thanks")
    assert user["content"] == [{"type": "text", "text": "Hello"}]
    assert assistant["reasoning_content"] == "Hm"
    assert [each["function"]["arguments"] for each in assistant["tool_calls"]] == [{"city": "Rome"}] * 2
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    assert body["chat_template_kwargs"]["tools"][0]["function"]["name"] == "weather"


def test_an_answer_that_was_cut_in_its_reasoning_can_be_continued():
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
    _, answer, question = sent(input=[{"role": "user", "content": "Hi"}, thought, {"role": "user", "content": "So?"}])[
        "messages"
    ]
    assert answer == {"role": "assistant", "reasoning_content": "Hm", "content": ""}
    assert question["content"] == "So?"


def test_images_are_parts_of_a_chat_and_keep_their_places():
    image = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "low"}
    conversation = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}, image]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [image]},
    ]
    parts = list(wire.image_parts(sent(input=conversation, instructions="Be short.", tools=[WEATHER])["messages"]))
    given = {"url": image["image_url"], "detail": "low"}
    assert [(part["image_url"], part["path"]) for part in parts] == [
        (given, "[0].content[1].image_url"),
        (given, "[2].output[0].image_url"),
    ]


def test_fields_reach_the_model_as_those_of_a_chat_do():
    extra = {"top_k": 5, "seed": 3, "request_id": "mine", "stop": ["x"]}
    body = sent(temperature=0, max_output_tokens=7, reasoning={"effort": "none"}, store=False, extra_body=extra)
    assert {**body, "temperature": 0, "max_tokens": 7, "req_id": "mine", "top_k": 5, "seed": 3, "stop": ["x"]} == body
    assert body["chat_template_kwargs"] == {"reasoning_effort": "none", "enable_thinking": False}
    forced = sent(tools=[WEATHER, TIME], tool_choice={"type": "function", "name": "time"})
    assert '"time' in forced["guided_grammar"].replace("\\", "") and "weather" not in forced["guided_grammar"]
    assert "guided_grammar" in sent(tools=[WEATHER], tool_choice="required")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}
    assert "guided_grammar" not in sent(tool_choice="auto")  # the default there, with tools or without
    once = sent(tools=[WEATHER, TIME], tool_choice=allowed, parallel_tool_calls=False)
    assert once["guided_grammar"] == forced["guided_grammar"]


def test_the_tokens_of_an_input_can_be_counted():
    backend = FakeBackend()
    with running(backend) as gateway, openai_client(gateway, "/v1") as client:
        counted = client.responses.input_tokens.count(model="m", input="Hi", instructions="Be brief.", tools=[WEATHER])
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", 0)  # the fake's template
        status, answer = gateway.refused(f"{PATH}/input_tokens", {"input": 5})
    assert (status, answer["error"]["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": 5}, "store"),
        ({"background": "yes"}, "background"),
        ({"background": True, "store": False}, "store"),
        ({"previous_response_id": [5]}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"previous_input_messages": [{}]}, "previous_input_messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input"),
        ({"input": [{"type": ["x"]}]}, "input"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 1000}, "temperature"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"input": 5}, "input` must be a text or a list of items, it is 5"),
        ({"text": 5}, "text"),
        ({"text": {"formats": {"type": "json_object"}}}, "format"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"reasoning": {"effort": 5}}, "reasoning"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"metadata": [5]}, "metadata"),
        ({"metadata": {"a": "b", "c": 5}}, "metadata"),
        ({"tools": [{"type": "function", "name": "f", "strict": "no"}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temprature": 1}, "temperature"),
        ({"max_tokens": 1}, "max_output_tokens"),
        ({"response_format": {"type": "json_object"}, "text": {}}, "text"),  # one of the two would be ignored
        ({"reasoning_max_tokens": -1}, "reasoning_max_tokens"),
        ({"include": ["reasoning"]}, "include"),
        ({"include": "reasoning.encrypted_content"}, "include"),
        ({"system": "Be short."}, "instructions"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input"),
    ],
)
def test_unsupported_fields_are_refused_by_the_name_that_the_client_knows(fields, param):
    backend = FakeBackend("a")
    with running(backend, tool_call_parser="hermes") as gateway:
        status, answer = gateway.refused(PATH, {**ASKED, **fields})
    assert (status, answer["error"]["param"], backend.bodies) == (400, param.partition("`")[0], [])
    assert f"`{param}" in answer["error"]["message"]


def test_errors_of_the_model_are_the_clients_exceptions_before_the_first_event_and_after_it():
    error = PromptTooLong("{field}({value})", field="max_dec_len", value=5)
    for fields in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(FakeBackend(error), **fields)
        assert (caught.value.param, caught.value.code) == ("max_output_tokens", "context_length_exceeded")
        assert caught.value.body["message"] == "max_output_tokens(5)"
    with running(FakeBackend("hi", EngineUnavailable("gone"))) as gateway, openai_client(gateway) as client:
        events = client.responses.create(**ASKED, stream=True)
        with pytest.raises(openai.APIError, match="gone"):
            list(events)
        payload = b"".join(gateway.stream(PATH, {**ASKED, "stream": True})).decode()
    last = json.loads(payload.strip().rpartition("data: ")[2])
    assert (last["type"], last["message"], last["code"]) == ("error", "gone", "engine_unavailable")
    assert last["sequence_number"] == 5
    with running(FakeBackend(InvalidRequest("no", field="messages"))) as gateway:
        assert gateway.refused(PATH, ASKED)[1]["error"]["param"] == "input"


def a_stored_response(backend, status="in_progress", **more):
    """Return the stored response of the last request, as the model process has it."""
    body = backend.bodies[-1]
    storing = body["_store"]
    return StoredResponse(body["req_id"], status, json.dumps([storing["about"], body["messages"]]), **more)


def test_a_request_in_the_background_is_answered_with_what_there_is_of_it():
    backend = FakeBackend("a")
    backend.stored = [lambda: a_stored_response(backend, "queued")]
    with running(backend) as gateway, openai_client(gateway) as client:
        begun = client.responses.create(**ASKED, background=True, metadata={"a": "b"})
        assert (begun.status, begun.output, begun.usage) == ("queued", [], None)
        assert (begun.background, begun.store) == (True, True)
        assert backend.bodies[0]["_store"]["is_background"] and begun.metadata == {"a": "b"}
        error = EngineUnavailable("the engine has crashed too often")
        backend.stored = [a_stored_response(backend, "failed", error=error)]
        failed = client.responses.retrieve(begun.id)
    assert (failed.id, failed.created_at, failed.status) == (begun.id, begun.created_at, "failed")
    assert (failed.error.code, failed.error.message) == ("server_error", "the engine has crashed too often")
    assert backend.bodies[1] == {"_stored": {"id": begun.id, "action": "retrieve"}}


def test_a_header_that_names_a_response_in_the_background_gets_a_suffix_where_another_has_the_id():
    backend = FakeBackend("a")
    duplicate = DuplicateRequest("it is open")
    backend.stored = [duplicate, lambda: a_stored_response(backend, "queued")]
    with running(backend) as gateway, openai_client(gateway) as client:
        begun = client.responses.create(**ASKED, background=True, extra_headers={"X-Request-Id": "mine"})
    assert [body["req_id"] for body in backend.bodies] == ["mine", begun.id]
    assert begun.id.startswith("mine-") and begun._request_id == begun.id


@pytest.mark.parametrize("status", ["queued", "in_progress", "failed", "cancelled"])
def test_only_a_response_that_is_complete_can_be_gone_on_with(status):
    backend = FakeBackend("a")
    with running(backend) as gateway:
        gateway.post(PATH, {**ASKED, "store": True})
        backend.stored = [a_stored_response(backend, status)]
        code, answer = gateway.refused(PATH, {**ASKED, "previous_response_id": "resp_1"})
    assert (code, answer["error"]["param"]) == (400, "previous_response_id")


def test_the_input_of_a_stored_response_is_listed_as_items():
    image = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "low"}
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
    conversation = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}, image]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi", "annotations": []}]},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "user", "content": "Thanks"},
    ]
    backend = FakeBackend("a")
    with running(backend, tool_call_parser="hermes") as gateway, openai_client(gateway) as client:
        client.responses.create(model="m", input=conversation, instructions="Be kind.", store=True, tools=[WEATHER])
        backend.stored = [a_stored_response(backend, "completed")] * 20
        items = list(client.responses.input_items.list("resp_1", order="asc"))
        hello, thought, hi, called, result, thanks = items
        assert [part.type for part in hello.content] == ["input_text", "input_image"]
        assert (hello.role, hello.content[0].text, hello.content[1].image_url) == ("user", "Hello", image["image_url"])
        assert (thought.content[0].text, hi.role, hi.content[0].text) == ("Hm", "assistant", "Hi")
        assert call.items() <= called.model_dump().items()
        assert (result.call_id, result.output, thanks.content[0].text) == ("c1", "sunny", "Thanks")
        assert len({item.id for item in items}) == 6
        assert list(client.responses.input_items.list("resp_1")) == items[::-1]
        paged = client.responses.input_items.list("resp_1", order="asc", limit=4)
        assert (paged.data, paged.has_more, paged.first_id, paged.last_id) == (items[:4], True, hello.id, called.id)
        assert [*paged] == items  # the client asks for the page after it
        last = client.responses.input_items.list("resp_1", limit=4, after=hello.id)
        assert (last.data, last.has_more, last.first_id) == ([], False, None)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("limit=0", '`limit` is "0", it must be a number from 1 to 100'),
        ("limit=many", '`limit` is "many", it must be a number from 1 to 100'),
        ("order=up", '`order` is "up", it must be one of [asc, desc]'),
        ("after=msg_1", '`after` is "msg_1", which is no id of an input item of this response'),
    ],
)
def test_a_page_of_input_items_that_does_not_exist_is_refused_by_name(query, text):
    backend = FakeBackend("a")
    with running(backend) as gateway:
        gateway.post(PATH, {**ASKED, "store": True})
        backend.stored = [a_stored_response(backend, "completed")]
        status, _, payload = gateway.send("GET", f"{PATH}/resp_1/input_items?{query}")
        error = json.loads(payload)["error"]
        assert (status, error["message"], error["param"]) == (400, text, query.partition("=")[0])
        assert gateway.send("GET", f"{PATH}/resp_1/input_items")[0] == 404  # it is not stored any more


def test_a_client_of_the_native_protocol_cannot_store_anything():
    backend = FakeBackend("a")
    with running(backend) as gateway:
        gateway.post("/v1/chat/completions", {"text": "Hi", "_store": {"about": {}, "is_background": True}})
    assert "_store" not in backend.bodies[0]


@pytest.mark.parametrize("query", ["stream=yes", "stream=true&starting_after=x", "stream=true&starting_after=-5"])
def test_a_wrong_way_to_retrieve_is_refused_by_its_name(query):
    backend = FakeBackend("a")
    with running(backend) as gateway:
        gateway.post(PATH, {**ASKED, "store": True})
        backend.bodies[-1]["_store"]["about"]["body"]["background"] = True
        backend.stored = [a_stored_response(backend, "completed")]
        status, _, payload = gateway.send("GET", f"{PATH}/resp_1?{query}")
    assert status == 400 and json.loads(payload)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("status", "error", "last"),
    [
        ("failed", EngineUnavailable("the engine has crashed too often"), "the engine has crashed too often"),
        ("cancelled", None, "the response was cancelled"),
    ],
)
def test_the_stream_of_a_stored_response_that_has_failed_ends_with_its_error(status, error, last):
    backend = FakeBackend("a")
    with running(backend) as gateway:
        gateway.post(PATH, {**ASKED, "store": True})
        backend.bodies[-1]["_store"]["about"]["body"]["background"] = True
        backend.stored = [a_stored_response(backend, status, error=error)]
        code, _, payload = gateway.send("GET", f"{PATH}/resp_1?stream=true")
    assert code in (200, 503, 499) and last in payload.decode()


def test_the_stream_of_a_stored_response_that_is_still_generated_waits_for_its_rest():
    backend = FakeBackend("a", " b")
    with running(backend) as gateway:
        gateway.post(PATH, {**ASKED, "store": True})
        backend.bodies[-1]["_store"]["about"]["body"]["background"] = True
        backend.stored = [a_stored_response(backend, "in_progress")]
        status, _, payload = gateway.send("GET", f"{PATH}/resp_1?stream=true")
    assert status == 200 and "response.completed" in payload.decode()
    assert backend.bodies[-1]["resume_from"] == [0]


def test_only_a_response_in_the_background_can_be_streamed_again():
    backend = FakeBackend("a")
    with running(backend) as gateway:
        gateway.post(PATH, {**ASKED, "store": True})
        backend.stored = [a_stored_response(backend, "completed")]
        status, _, payload = gateway.send("GET", f"{PATH}/resp_1?stream=true")
    assert status == 400 and "only one whose request has `background` set" in payload.decode()


def test_a_response_that_is_not_there_cannot_be_gone_on_with():
    with running(FakeBackend("a")) as gateway:
        status, answer = gateway.refused(PATH, {**ASKED, "previous_response_id": "resp_1"})
    assert (status, answer["error"]["param"]) == (404, "previous_response_id")


@pytest.mark.parametrize("cut", [("Sunny", " and", " warm."), ("S", "unny and warm", "."), ("Sunny and warm.",)])
def test_the_numbers_of_a_stream_in_the_background_do_not_depend_on_how_its_text_is_cut(cut):
    asked = {"background": True, "stream": True, "extra_body": {"include_reasoning": True}}
    events = ask(FakeBackend(*THINKS[:2], *cut), **asked)
    of_whole = ask(FakeBackend("".join(THINKS[:2]), "Sunny and warm."), **asked)
    numbers = {event.sequence_number: event.type for event in events}
    assert {event.sequence_number: event.type for event in of_whole}.items() <= numbers.items()
    assert [*numbers] == sorted(numbers)
