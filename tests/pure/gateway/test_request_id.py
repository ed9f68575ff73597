"""`X-Request-Id` names an answer, comes back with it, and is unique among the open requests."""

import json
import logging
import threading
import types

import pytest

from engine.errors import DuplicateRequest
from tests.pure.gateway_fake import PATIENCE_S, WAIT, FakeBackend, events, openai_client, running

MESSAGES = [{"role": "user", "content": "hi"}]
A_CHAT = {"messages": MESSAGES}
BODIES = {
    "/v1/chat/completions": A_CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {**A_CHAT, "max_tokens": 8},
    "/v1/responses": {"input": "hi"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
}
NATIVE = {"text": "hi"}


class OpenIds(FakeBackend):
    """Refuses an id that is open, as the model does."""

    def __init__(self, *script):
        super().__init__(*script)
        self.open: set[str] = set()

    async def generate(self, body, timeout_s):
        if body["req_id"] in self.open:
            raise DuplicateRequest("open")
        self.open.add(body["req_id"])
        async for answer in super().generate(body, timeout_s):
            yield answer
        self.open.discard(body["req_id"])


def asked(gateway, path, body, request_id):
    """Return the id in the header of the response, and the answer."""
    status, headers, payload = gateway.send("POST", path, body, {"X-Request-Id": request_id})
    assert status == 200, payload
    return headers["X-Request-Id"], payload


@pytest.mark.parametrize("path", BODIES)
def test_the_header_is_the_id_of_the_answer_and_comes_back(path):
    with running(FakeBackend("a")) as gateway:
        request_id, payload = asked(gateway, path, BODIES[path], "order-66/x")
    assert (request_id, json.loads(payload)["id"]) == ("order-66/x", "order-66/x")


def test_the_header_is_the_id_of_a_native_answer_unless_its_body_has_one():
    with running(FakeBackend("a")) as gateway:
        for body, expected in ((NATIVE, "q"), ({**NATIVE, "req_id": "own"}, "own")):
            request_id, payload = asked(gateway, "/v1/chat/completions", body, "q")
            assert (request_id, json.loads(payload)["req_id"]) == (expected, expected)


def test_the_header_is_the_id_of_every_event_of_a_stream():
    with running(FakeBackend("a", "b")) as gateway:
        request_id, payload = asked(gateway, "/v1/chat/completions", {**A_CHAT, "stream": True}, "q")
    assert request_id == "q"
    assert {chunk["id"] for chunk in events([payload])[:-1]} == {"q"}


def test_the_header_wins_over_the_request_id_of_the_body():
    with running(FakeBackend("a")) as gateway:
        body = {**A_CHAT, "request_id": "body"}
        assert asked(gateway, "/v1/chat/completions", body, "header")[0] == "header"


@pytest.mark.slow
def test_clients_know_the_id_of_answers_and_errors(caplog):
    import anthropic  # late, as it takes a second of every test worker

    with caplog.at_level(logging.INFO), running(FakeBackend("a")) as gateway, openai_client(gateway) as client:
        answer = client.chat.completions.create(model="m", messages=MESSAGES, extra_headers={"X-Request-Id": "q-1"})
        assert (answer.id, answer._request_id) == ("q-1", "q-1")
        answer = client.chat.completions.create(model="m", messages=MESSAGES)
        assert answer._request_id == answer.id
        with pytest.raises(Exception, match="temperature") as raised:
            client.chat.completions.create(
                model="m", messages=MESSAGES, temperature=-1, extra_headers={"X-Request-Id": "q-2"}
            )
        assert raised.value.request_id == "q-2"
        other = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0)
        message = other.messages.create(model="m", max_tokens=8, messages=MESSAGES)
        assert message._request_id == message.id
    lines = [record.getMessage() for record in caplog.records if record.name == "gateway.app"]
    assert [line.rpartition("id=")[2] for line in lines] == ["q-1", answer.id, "q-2", message.id]


@pytest.mark.parametrize(
    ("request_id", "text"),
    [
        ("q" * 257, "the header `X-Request-Id` has 257 characters, the limit is 256"),
        ("a b", 'the header `X-Request-Id` must be visible ASCII without spaces, it is "a b"'),
        ("\xe9", 'the header `X-Request-Id` must be visible ASCII without spaces, it is "\\udce9"'),
    ],
)
def test_a_header_that_is_no_id_is_refused_and_not_repeated(caplog, request_id, text):
    with caplog.at_level(logging.INFO), running(FakeBackend("a")) as gateway:
        headers = {"X-Request-Id": request_id}
        status, reported, payload = gateway.send("POST", "/v1/chat/completions", A_CHAT, headers)
        assert (status, json.loads(payload)["error"]["message"]) == (400, text)
        assert reported["X-Request-Id"].isalnum()
        assert gateway.send("GET", "/v1/models", None, headers)[0] == 200
    assert request_id not in caplog.text


def test_an_id_of_256_characters_is_taken_as_it_is():
    with running(FakeBackend("a")) as gateway:
        assert asked(gateway, "/v1/chat/completions", A_CHAT, "~" * 256)[0] == "~" * 256


@pytest.mark.parametrize("request_id", ["q", "q" * 256])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", A_CHAT),
        ("/v1/chat/completions", NATIVE),
        ("/v1/messages", BODIES["/v1/messages"]),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_an_id_that_another_open_request_has_gets_a_suffix(path, body, stream, request_id):
    backend = OpenIds("a")
    backend.scripts = [(WAIT, "a")]
    with running(backend) as gateway:
        first = threading.Thread(target=asked, args=(gateway, path, body, request_id))
        first.start()
        assert backend.waiting.acquire(timeout=PATIENCE_S)
        reported, payload = asked(gateway, path, {**body, "stream": stream}, request_id)
        backend.go()
        first.join(PATIENCE_S)
    assert reported != request_id
    assert reported.startswith(request_id[:240] + "-")
    assert len(reported) <= 256
    assert reported.encode() in payload
    assert [each["req_id"] for each in backend.bodies] == [request_id, reported]


def test_several_prompts_get_a_suffix_too():
    backend = OpenIds("a")
    backend.scripts = [(WAIT, "a")] * 2
    body = {"prompt": ["one", "two"]}
    with running(backend) as gateway:
        first = threading.Thread(target=asked, args=(gateway, "/v1/completions", body, "q"))
        first.start()
        for _ in range(2):
            assert backend.waiting.acquire(timeout=PATIENCE_S)
        reported, payload = asked(gateway, "/v1/completions", body, "q")
        backend.go()
        first.join(PATIENCE_S)
    answer = json.loads(payload, object_hook=lambda each: types.SimpleNamespace(**each))
    assert answer.id == reported != "q"
    assert [choice.text for choice in answer.choices] == ["a", "a"]
    assert [each["req_id"] for each in backend.bodies] == ["q-0", "q-1", f"{reported}-0", f"{reported}-1"]


def test_an_answer_that_is_resumed_gets_no_suffix():
    with running(FakeBackend(DuplicateRequest("open"))) as gateway:
        headers = {"X-Request-Id": "q", "Last-Event-ID": "0"}
        status, reported, _ = gateway.send("POST", "/v1/chat/completions", A_CHAT, headers)
    assert (status, reported["X-Request-Id"]) == (409, "q")


def test_a_suffix_is_added_once():
    with running(FakeBackend(DuplicateRequest("open"))) as gateway:
        assert gateway.send("POST", "/v1/chat/completions", A_CHAT, {"X-Request-Id": "q"})[0] == 409
