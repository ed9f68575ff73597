"""OpenAI's protocol with the unmodified client, under both base URLs, and the bytes of its streams."""

import contextlib

import openai
import pytest

from engine.errors import DuplicateRequest, EngineUnavailable, Overloaded, PromptTooLong, TimedOut
from tests.pure.gateway_fake import WAIT, FakeBackend, events, running

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BASES = ["/v1", "/v1/chat/completions"]  # the usual one and the documented one
MESSAGES = [
    {"role": "user", "content": "Hello, who are you"},
    {"role": "system", "content": "I'm a helpful AI assistant."},
    {"role": "user", "content": "List 3 countries and their capitals."},
]
A_CHAT = {"model": "default", "messages": MESSAGES}
A_COMPLETION = {"model": "default", "prompt": "Hello, how are you?"}


@contextlib.contextmanager
def client_of(gateway, base="/v1"):
    with openai.Client(base_url=gateway.url + base, api_key="EMPTY_API_KEY", max_retries=0, timeout=10) as client:
        yield client


@contextlib.contextmanager
def client_for(backend, base="/v1"):
    with running(backend) as gateway, client_of(gateway, base) as client:
        yield client


# --- the documented examples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
def test_the_documented_completion_works(base):
    backend = FakeBackend("I am", " fine")
    with client_for(backend, base) as client:
        answer = client.completions.create(model="default", prompt="Hello, how are you?", max_tokens=50, stream=False)
    [choice] = answer.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == ("I am fine", 0, "stop", None)
    assert (answer.object, answer.model, answer.id) == ("text_completion", "default", backend.bodies[0]["req_id"])
    assert answer.id.startswith("cmpl-")
    assert answer.created > 1.7e9
    assert answer.usage.to_dict() == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


@pytest.mark.parametrize("base", BASES)
def test_the_documented_completion_stream_works(base):
    with client_for(FakeBackend("I am", " fine"), base) as client:
        stream = client.completions.create(model="default", prompt="Hello, how are you?", max_tokens=100, stream=True)
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "I am fine"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]


@pytest.mark.parametrize("base", BASES)
def test_the_documented_chat_works(base):
    backend = FakeBackend("Paris", ", Rome", finish_reason="length")
    with client_for(backend, base) as client:
        answer = client.chat.completions.create(**A_CHAT, temperature=0, max_tokens=64, stream=False)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Paris, Rome")
    assert (choice.finish_reason, answer.object) == ("length", "chat.completion")
    assert answer.id.startswith("chatcmpl-")
    [body] = backend.bodies
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.0, 1.0, 64)
    assert body["messages"] == MESSAGES


@pytest.mark.parametrize("base", BASES)
def test_the_documented_chat_stream_works(base):
    with client_for(FakeBackend("Paris", ", Rome"), base) as client:
        chunks = list(client.chat.completions.create(**A_CHAT, temperature=0, max_tokens=64, stream=True))
    contents = [chunk.choices[0].delta.content for chunk in chunks]
    assert contents == ["", "Paris", ", Rome", ""]  # none is None: the example prints each
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None, None]
    assert {(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks} == {
        (chunks[0].id, chunks[0].created, "default", "chat.completion.chunk")
    }


@pytest.mark.parametrize("base", BASES)
def test_the_models_are_listed_with_their_length(base):
    with running(FakeBackend(), model_name="deepseek-ai/R1") as gateway, client_of(gateway, base) as client:
        [model] = client.models.list().data
        assert (model.id, model.object, model.max_model_len) == ("deepseek-ai/R1", "model", 8192)
        assert client.models.retrieve("deepseek-ai/R1") == model
        with pytest.raises(openai.NotFoundError, match="the served model is `deepseek-ai/R1`"):
            client.models.retrieve("gpt-4")


# --- streams, to the byte ---------------------------------------------------------------------------------------


def test_the_stream_ends_with_done_after_everything_else():
    with running(FakeBackend("a", "b")) as gateway:
        stream = gateway.stream(CHAT, {**A_CHAT, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, usage, done = events(stream)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 7
    assert all(chunk["usage"] is None for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_an_event_is_one_write_and_the_role_comes_with_the_first_text():
    with running(FakeBackend("a", "b")) as gateway:
        first, second, last = gateway.stream(CHAT, {**A_CHAT, "stream": True})
    assert [len(events([chunk])) for chunk in (first, second, last)] == [2, 1, 2]


def test_no_usage_chunk_comes_unasked():
    with running(FakeBackend("a")) as gateway:
        chunks = events(gateway.stream(CHAT, {**A_CHAT, "stream": True}))
    assert all(chunk == "[DONE]" or ("usage" not in chunk and chunk["choices"]) for chunk in chunks)


def test_usage_may_be_in_every_chunk():
    options = {"include_usage": True, "continuous_usage_stats": True}
    with running(FakeBackend("a", "b")) as gateway:
        stream = gateway.stream(COMPLETIONS, {**A_COMPLETION, "stream": True, "stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in events(stream)[:-1]] == [1, 2, 2, 2]


def test_text_that_is_held_back_makes_no_chunk():
    with running(FakeBackend("", "a")) as gateway:
        chunks = events(gateway.stream(COMPLETIONS, {**A_COMPLETION, "stream": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["a", ""]


def test_line_separators_in_the_text_do_not_break_lines():
    text = "a\u2028b\u2029c\x85d\ne"
    with running(FakeBackend(text)) as gateway:
        stream = gateway.stream(COMPLETIONS, {**A_COMPLETION, "stream": True})
        chunks = events(stream)
    assert chunks[0]["choices"][0]["text"] == text
    assert all(len(line.splitlines()) == 1 for line in b"".join(stream).decode().split("\n\n")[:-1])


def test_an_error_after_the_first_token_is_the_last_event_and_raises_in_the_client():
    backend = FakeBackend("a", EngineUnavailable("the engine has crashed"))
    with running(backend) as gateway, client_of(gateway) as client:
        *_, last = events(gateway.stream(CHAT, {**A_CHAT, "stream": True}))
        stream = client.chat.completions.create(**A_CHAT, stream=True)
        with pytest.raises(openai.APIError, match="the engine has crashed"):
            list(stream)
    text = "the engine has crashed"
    assert last == {"error": {"message": text, "type": "server_error", "param": None, "code": "engine_unavailable"}}


# --- several choices --------------------------------------------------------------------------------------------


def test_n_choices_are_n_requests_with_their_own_ids_and_seeds():
    backend = FakeBackend("a", "b")
    with client_for(backend) as client:
        answer = client.chat.completions.create(**A_CHAT, n=3, seed=2**63 - 1)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "ab"), (1, "ab"), (2, "ab")]
    assert [body["seed"] for body in backend.bodies] == [2**63 - 1, 0, 1]
    assert len({body["req_id"] for body in backend.bodies}) == 3
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 6)


def test_streamed_choices_are_interleaved_and_each_ends_once():
    with client_for(FakeBackend("a", "b")) as client:
        chunks = list(client.chat.completions.create(**A_CHAT, n=4, stream=True))
    for index in range(4):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.delta.content for choice in own) == "ab"
        assert [choice.finish_reason for choice in own] == [None, None, None, "stop"]
    assert {chunk.choices[0].index for chunk in chunks[:8]} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("prompt", "sources"),
    [
        ("hi", [{"text": "hi"}]),
        (["hi", "ho"], [{"text": "hi"}, {"text": "ho"}]),
        ([1, 2], [{"input_ids": [1, 2]}]),
        ([[1, 2], [3]], [{"input_ids": [1, 2]}, {"input_ids": [3]}]),
    ],
)
def test_prompts_are_texts_or_token_ids_one_or_several(prompt, sources):
    backend = FakeBackend("a")
    with client_for(backend) as client:
        answer = client.completions.create(model="m", prompt=prompt, n=2)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(sources)))
    keys = ("text", "input_ids")
    got = [{key: body[key] for key in keys if key in body} for body in backend.bodies]
    assert got == [source for source in sources for _ in range(2)]
    assert all(body.get("apply_chat_template") is False for body in backend.bodies if "text" in body)
    assert answer.usage.prompt_tokens == 5 * len(sources)


def test_a_failing_choice_ends_its_siblings():
    backend = FakeBackend()
    backend.scripts = [("a", WAIT), ("a", "b", EngineUnavailable("gone")), ("a", WAIT)]
    with running(backend) as gateway:
        stream = events(gateway.stream(CHAT, {**A_CHAT, "n": 3, "stream": True}))
        assert all(backend.cancelled.acquire(timeout=5) for _ in range(2))
    assert [event["error"]["message"] for event in stream if "error" in event] == ["gone"]
    assert "error" in stream[-1]


def test_echo_puts_the_prompt_before_the_text():
    with client_for(FakeBackend("a", "b")) as client:
        answer = client.completions.create(model="m", prompt=["1", "2"], echo=True)
        stream = list(client.completions.create(model="m", prompt="1", echo=True, stream=True))
    assert [choice.text for choice in answer.choices] == ["1ab", "2ab"]
    assert [chunk.choices[0].text for chunk in stream] == ["1a", "b", ""]


# --- logprobs ---------------------------------------------------------------------------------------------------


def test_chat_logprobs_have_openais_shape():
    backend = FakeBackend("a", "é")
    with client_for(backend) as client:
        answer = client.chat.completions.create(**A_CHAT, logprobs=True, top_logprobs=2)
        chunks = list(client.chat.completions.create(**A_CHAT, logprobs=True, top_logprobs=2, stream=True))
    assert [body["logprobs"] for body in backend.bodies] == [2, 2]
    content = answer.choices[0].logprobs.content
    assert [(each.token, each.logprob, each.bytes) for each in content] == [("a", -0.5, [97]), ("é", -0.5, [195, 169])]
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("a", -0.5), ("x", -9999.0)]
    streamed = [chunk.choices[0].logprobs for chunk in chunks]
    assert [each.content[0].token if each else None for each in streamed] == [None, "a", "é", None]


def test_completion_logprobs_have_openais_shape():
    expected = {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"ab": -0.5, "x": -9999.0}, {"c": -0.5, "x": -9999.0}],
        "text_offset": [0, 2],
    }
    with client_for(FakeBackend("ab", "c")) as client:
        answer = client.completions.create(**A_COMPLETION, logprobs=2)
        chunks = list(client.completions.create(**A_COMPLETION, logprobs=2, stream=True))
    assert answer.choices[0].logprobs.to_dict() == expected
    streamed = [chunk.choices[0].logprobs.to_dict() for chunk in chunks if chunk.choices[0].logprobs]
    assert {key: streamed[0][key] + streamed[1][key] for key in expected} == expected


def test_a_part_of_a_character_is_named_by_its_bytes():
    from gateway.openai_answer import _name

    assert _name({"token": "\ufffd", "bytes": [0xE4, 0xBD]}) == "bytes:\\xe4\\xbd"


# --- what reaches the model -------------------------------------------------------------------------------------


def sent(body, path=CHAT):
    backend = FakeBackend("a")
    with running(backend) as gateway:
        gateway.post(path, body)
    [body] = backend.bodies
    del body["req_id"]
    return body


def test_openais_defaults_are_not_the_native_ones():
    assert sent(A_COMPLETION, COMPLETIONS) == {
        "text": "Hello, how are you?",
        "apply_chat_template": False,
        "temperature": 1.0,
        "top_p": 1.0,
    }


def test_zeros_and_falses_are_honoured_and_nulls_are_not_given():
    zeros = {
        "temperature": 0,
        "top_p": 0,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "seed": 0,
        "top_k": 0,
        "min_p": 0,
        "skip_special_tokens": False,
        "ignore_eos": False,
    }
    nothing = {"stop": None, "max_tokens": None, "n": None, "logprobs": None, "tools": None, "stream_options": None}
    assert sent({**A_CHAT, **zeros, **nothing, "min_tokens": 0}) == {"messages": MESSAGES, **zeros}


def test_every_extension_that_clients_of_other_servers_send_reaches_the_model():
    extensions = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "bad_words": ["x"],
        "logit_bias": {"7": -100},
        "stop": ["a", "b"],
        "seed": 9,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
    }
    assert sent({**A_CHAT, **extensions}) == {"messages": MESSAGES, "temperature": 1.0, "top_p": 1.0, **extensions}


def test_the_newer_name_of_max_tokens_wins():
    assert sent({**A_CHAT, "max_tokens": 5, "max_completion_tokens": 7})["max_tokens"] == 7


def test_developers_are_systems_to_the_template():
    body = sent({"messages": [{"role": "developer", "content": "be short"}]})
    assert body["messages"] == [{"role": "system", "content": "be short"}]


def test_what_is_harmless_is_ignored():
    harmless = {
        "user": "u",
        "metadata": {},
        "store": True,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "suffix": "",
        "best_of": 1,
        "something": "else",
    }
    assert sent({**A_CHAT, **harmless}) == {"messages": MESSAGES, "temperature": 1.0, "top_p": 1.0}


def test_any_model_name_is_taken_and_none_is_the_served_one():
    with running(FakeBackend("a"), model_name="mine") as gateway:
        assert gateway.post(CHAT, {**A_CHAT, "model": "gpt-\u4f60"})["model"] == "gpt-\u4f60"
        assert gateway.post(CHAT, {"messages": MESSAGES})["model"] == "mine"


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"audio": {"voice": "x"}}, "audio"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"n": 17}, "n"),
        (CHAT, {"n": True}, "n"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"top_p": 2}, "top_p"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 1.5}, "max_completion_tokens"),
        (CHAT, {"stream": "yes"}, "stream"),
        (CHAT, {"stream_options": []}, "stream_options"),
        (CHAT, {"stop": [1]}, "stop"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": 1.5}, "logprobs"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"model": 5}, "model"),
        (CHAT, {"model": "\ud800"}, "model"),
        (COMPLETIONS, {"suffix": "end"}, "suffix"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo"),
        (COMPLETIONS, {"echo": True, "prompt": [1, 2]}, "echo"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": {}}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [-1]]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 100, "n": 2}, "prompt"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(path, fields, param):
    backend = FakeBackend("a")
    with running(backend) as gateway:
        status, answer = gateway.refused(path, {**(A_CHAT if path == CHAT else A_COMPLETION), **fields})
    assert (status, set(answer)) == (400, {"error"})
    error = answer["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, "invalid_request")
    assert param in error["message"]
    assert backend.bodies == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "kind", "code", "headers"),
    [
        (PromptTooLong("too long"), openai.BadRequestError, "context_length_exceeded", {}),
        (DuplicateRequest("twice"), openai.ConflictError, "duplicate_request", {"x-should-retry": "false"}),
        (Overloaded("full"), openai.RateLimitError, "overloaded", {"retry-after": "1"}),
        (EngineUnavailable("gone"), openai.InternalServerError, "engine_unavailable", {"retry-after": "1"}),
        (TimedOut("silent"), openai.InternalServerError, "timeout", {"x-should-retry": "false"}),
    ],
)
def test_a_refusal_of_the_model_keeps_its_status(stream, error, kind, code, headers):
    with client_for(FakeBackend(error)) as client, pytest.raises(kind) as caught:
        client.chat.completions.create(**A_CHAT, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (error.code, code)
    assert caught.value.body["message"] == str(error)
    assert headers.items() <= dict(caught.value.response.headers).items()


def test_a_request_under_the_documented_base_url_is_never_native():
    with running(FakeBackend("a")) as gateway:
        status, answer = gateway.refused("/v1/chat/completions/completions", {"text": "hi"})
    assert (status, answer["error"]["param"]) == (400, "prompt")
