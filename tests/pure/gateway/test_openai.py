"""OpenAI's protocol with the unmodified client, under both base URLs, and the bytes of its streams."""

import contextlib

import openai
import pytest

from engine.errors import EngineUnavailable
from engine.wire import TokenLogprob
from gateway.openai.logprobs import TextOffsets, name_of, of_chat
from tests.pure.gateway_fake import PATIENCE_S, WAIT, FakeBackend, events, openai_client, running

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
def client_for(backend, base="/v1"):
    with running(backend) as gateway, openai_client(gateway, base) as client:
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
    assert {chunk.object for chunk in chunks} == {"text_completion"}


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
    with running(FakeBackend(), served_model_name="deepseek-ai/R1") as gateway, openai_client(gateway, base) as client:
        [model] = client.models.list().data
        assert (model.id, model.object, model.max_model_len) == ("deepseek-ai/R1", "model", 8192)
        assert (model.input_modalities, model.output_modalities) == (["text"], ["text"])
        assert client.models.retrieve("deepseek-ai/R1") == model
        assert client.models.retrieve("default") == model
        with pytest.raises(openai.NotFoundError, match="the served model is `deepseek-ai/R1`") as caught:
            client.models.retrieve("gpt-4")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("stop", ["END", 7])
def test_the_stop_string_or_id_is_returned_with_the_finish_reason(stop):
    with client_for(FakeBackend("a", stop_reason=stop)) as client:
        [choice] = client.chat.completions.create(**A_CHAT).choices
        chunks = list(client.chat.completions.create(**A_CHAT, stream=True))
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert [getattr(chunk.choices[0], "stop_reason", "absent") for chunk in chunks] == ["absent", "absent", stop]


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
        chat = gateway.stream(CHAT, {**A_CHAT, "n": 2, "stream": True, "stream_options": options})
        usages = [(chunk["choices"], chunk["usage"]["completion_tokens"]) for chunk in events(chat)[:-1]]
    of_roles = [usage for choices, usage in usages if choices and "role" in choices[0]["delta"]]
    assert of_roles == [0, 1]  # those of the other choice, none of its own


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
    with running(backend) as gateway, openai_client(gateway) as client:
        *_, last = events(gateway.stream(CHAT, {**A_CHAT, "stream": True}))
        stream = client.chat.completions.create(**A_CHAT, stream=True)
        with pytest.raises(openai.APIError, match="the engine has crashed"):
            list(stream)
    text = "the engine has crashed"
    assert last == {"error": {"message": text, "type": "server_error", "param": None, "code": "engine_unavailable"}}


# --- several choices --------------------------------------------------------------------------------------------


def test_n_choices_are_one_request_a_prompt():
    backend = FakeBackend("a", "b")
    with client_for(backend) as client:
        answer = client.chat.completions.create(**A_CHAT, n=3, seed=2**63 - 1)
        client.completions.create(model="m", prompt=["1", "2"], n=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "ab"), (1, "ab"), (2, "ab")]
    assert [body["n"] for body in backend.bodies] == [3, 3, 3]
    assert backend.bodies[0]["seed"] == 2**63 - 1
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
        (["hi"], [{"text": "hi"}]),
        ([1, 2], [{"input_ids": [1, 2]}]),
        ([0], [{"input_ids": [0]}]),
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
    assert got == sources
    assert all(body.get("apply_chat_template") is False for body in backend.bodies if "text" in body)
    assert answer.usage.prompt_tokens == 5 * len(sources)


def test_a_prompt_that_fails_ends_the_others():
    backend = FakeBackend()
    backend.scripts = [("a", WAIT), ("a", "b", EngineUnavailable("gone")), ("a", WAIT)]
    with running(backend) as gateway:
        stream = events(gateway.stream(COMPLETIONS, {"prompt": ["1", "2", "3"], "stream": True}))
        assert all(backend.cancelled.acquire(timeout=PATIENCE_S) for _ in range(2))
    assert [event["error"]["message"] for event in stream if "error" in event] == ["gone"]
    assert "error" in stream[-1]


def test_echo_puts_the_prompt_before_the_text():
    with client_for(FakeBackend("a", "b")) as client:
        answer = client.completions.create(model="m", prompt=["1", "2"], echo=True, n=2)
        stream = list(client.completions.create(model="m", prompt="1", echo=True, stream=True))
    assert [choice.text for choice in answer.choices] == ["1ab", "1ab", "2ab", "2ab"]
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


@pytest.mark.parametrize(
    ("text", "tokens", "offsets"),
    [
        ("ab", [b"a", b"<|im_end|>", b"b"], [0, 1, 1]),  # a special token is not in the text
        ("a<s>b", [b"a", b"<s>", b"b"], [0, 1, 4]),  # unless it is wanted there
        ("a b", [b" a", b" b", b""], [0, 1, 3]),  # some tokenizers drop the first space of a text
        ("\u4f60b", [b"\xe4", b"\xbd", b"\xa0", b"b"], [0, 0, 0, 1]),
        ("\u4f60b", [b"\xe4", b"</s>", b"\xbd\xa0", b"b"], [0, 0, 0, 1]),
        ("\ufffdb", [b"\xff", b"b"], [0, 1]),
        ("ab", [b"a", b"bcd"], [0, 1]),  # cut by a stop string
        ("", [b"</s>", b"</s>"], [0, 0]),
    ],
)
def test_offsets_of_tokens_are_those_in_the_text(text, tokens, offsets):
    tokens = [TokenLogprob(0, bytes=tuple(token)) for token in tokens]
    assert TextOffsets().offsets(text, tokens) == offsets
    for first in range(len(text) + 1):  # a part of it may come before its token
        for num_tokens in range(len(tokens) + 1):
            if len(text[:first].encode()) >= sum(len(token.bytes) for token in tokens[:num_tokens]):
                streamed = TextOffsets()
                parts = (text[:first], tokens[:num_tokens]), (text[first:], tokens[num_tokens:])
                assert [offset for part in parts for offset in streamed.offsets(*part)] == offsets


@pytest.mark.parametrize("stream", [True, False])
def test_a_token_that_is_left_out_of_the_text_does_not_shift_the_offsets_after_it(stream):
    class Skipping(FakeBackend):
        def delta_fields(self, body, texts, text):
            fields = super().delta_fields(body, texts, text)
            return fields | {"token": ""} if text == "<|im_end|>" else fields

    with client_for(Skipping("ab", "<|im_end|>", "c", "d")) as client:
        answer = client.completions.create(**A_COMPLETION, logprobs=0, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset]
    assert offsets == [0, 2, 2, 3]


def test_a_part_of_a_character_is_named_by_its_bytes():
    assert name_of(TokenLogprob(0, "\ufffd", (0xE4, 0xBD))) == "bytes:\\xe4\\xbd"


def test_a_token_without_a_logprob_gets_the_lowest_one():
    [reported] = of_chat([TokenLogprob(7)])["content"]
    assert reported == {"token": "", "logprob": -9999.0, "bytes": [], "top_logprobs": []}
