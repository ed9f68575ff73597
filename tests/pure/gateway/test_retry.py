"""A model server that dies under open requests: they are asked again when it is back, and go on after what has come."""

import json
import threading

import pytest

from engine.errors import EngineUnavailable, InvalidRequest
from engine.wire import Delta, Final, ModelState
from gateway import retry
from gateway.backend import ModelLost, ModelUnreachable
from tests.pure.gateway_fake import FakeBackend, a_logprob, openai_client, running

CHAT = "/v1/chat/completions"
LOST, GONE = ModelLost("the model server has gone"), ModelUnreachable("model server unreachable")
A_CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(retry, "CHECK_EVERY_S", 0.01)


def lines_of(gateway, path, body):
    return [json.loads(line) for line in gateway.stream(path, body)]


def a_backend(*scripts):
    backend = FakeBackend()
    backend.scripts = list(scripts)
    return backend


@pytest.mark.parametrize("stream", [True, False])
def test_a_native_answer_goes_on_where_the_model_server_died(stream):
    backend = a_backend(("a", "b", LOST), ("c", LOST), ("d",))
    with running(backend) as gateway:
        lines = lines_of(gateway, CHAT, {"text": "Hi", "req_id": "r", "stream": True}) if stream else None
        last = lines[-1] if stream else gateway.post(CHAT, {"text": "Hi", "req_id": "r"})
    assert last["tokens_all"] == "abcd"
    if stream:
        assert [(line["token"], line["send_idx"]) for line in lines] == [*zip("abcd", range(4), strict=True), ("", 4)]
    first = {"text": "Hi", "req_id": "r", "stream": stream} if stream else {"text": "Hi", "req_id": "r"}
    assert backend.bodies == [
        first,
        {**first, "resume_from": [2], "answer_ids": [[0, 1]], "infer_seed": 3},
        {**first, "resume_from": [3], "answer_ids": [[0, 1, 2]], "infer_seed": 3},
    ]


def test_openais_stream_goes_on_too():
    backend = a_backend(("a", LOST), ("b", "c"))
    with running(backend) as gateway, openai_client(gateway) as client:
        chunks = list(client.chat.completions.create(**A_CHAT, n=2, seed=7, stream=True))
    texts = ["".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i) for i in range(2)]
    assert texts == ["abc", "abc"]
    assert backend.bodies[1]["resume_from"] == [1, 1]
    assert "infer_seed" not in backend.bodies[1]  # the client's own is there


@pytest.mark.parametrize("stream", [True, False])
def test_the_cached_tokens_of_the_prompt_are_known_after_the_model_server_died(stream):
    backend = a_backend(("a", LOST), ("b",), ("a", LOST), ("b",))
    with running(backend) as gateway, openai_client(gateway) as client:
        if stream:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            *_, answer = client.chat.completions.create(**A_CHAT, **options)
        else:
            answer = client.chat.completions.create(**A_CHAT)
        native = gateway.post(CHAT, {"text": "Hi", "return_usage": True})
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert native["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 4}


def test_a_client_that_goes_on_itself_is_asked_for_with_what_is_known_here():
    backend = a_backend(("c", LOST), ("d",), ("c", LOST), ("d",))
    backend.sent_texts = {"r": ["a", "b"], "s": ["a", "b"]}
    with running(backend) as gateway:
        for req_id, known in (("r", {}), ("s", {"answer_ids": [0, 1, 9]})):
            lines = lines_of(gateway, CHAT, {"text": "Hi", "req_id": req_id, "resume_from": 2, "stream": True, **known})
            assert lines[-1]["tokens_all"] == "abcd"
    assert (backend.bodies[1]["resume_from"], backend.bodies[3]["resume_from"]) == ([3], [3])
    assert "answer_ids" not in backend.bodies[1]
    assert backend.bodies[3]["answer_ids"] == [[0, 1, 2]]


def test_it_waits_until_the_model_server_is_back():
    backend = a_backend(("a", LOST), (GONE,), ("b",))
    with running(backend) as gateway:
        backend.state = GONE
        back = threading.Timer(0.3, lambda: setattr(backend, "state", ModelState(ready=True)))
        back.start()
        assert gateway.post(CHAT, {"text": "Hi"})["tokens_all"] == "ab"
        back.join()
    assert backend.num_probes >= 2


def test_a_model_server_that_does_not_come_back_is_waited_for_as_long_as_for_an_answer():
    backend = FakeBackend(GONE)
    backend.scripts = [("a", LOST)]
    with running(backend) as gateway:
        backend.state = GONE
        status, error = gateway.refused(CHAT, {"text": "Hi", "timeout": 0.2})
    assert (status, error["error_msg"]) == (503, "model server unreachable")


def test_a_request_that_was_never_taken_is_refused_at_once():
    backend = FakeBackend(GONE)
    with running(backend) as gateway:
        assert gateway.refused(CHAT, {"text": "Hi"})[0] == 503
    assert len(backend.bodies) == 1


def test_a_request_that_the_model_refuses_the_second_time_is_refused():
    backend = a_backend(("a", LOST), (EngineUnavailable("the engine has crashed too often"),))
    with running(backend) as gateway:
        assert gateway.refused(CHAT, {"text": "Hi"})[1]["error_msg"] == "the engine has crashed too often"


def test_a_request_that_ends_every_model_server_is_given_up():
    backend = FakeBackend(LOST)
    with running(backend) as gateway:
        status, error = gateway.refused(CHAT, {"text": "Hi"})
    assert (status, error["error_msg"]) == (503, "the model server has gone")
    assert len(backend.bodies) == 1 + retry.MAX_LOSSES


# --- OpenAI's clients that ask again themselves ---


def numbered(gateway, last, request_id="q", **fields):
    """Return the events of a stream, each with its id."""
    headers = {"Last-Event-ID": last, "X-Request-Id": request_id}
    status, _, payload = gateway.send("POST", CHAT, {**A_CHAT, "stream": True, **fields}, headers)
    assert status == 200, payload
    events = [event.split("\n") for event in payload.decode().split("\n\n")[:-1]]
    return [(event[0].removeprefix("id: ") if len(event) == 2 else None, event[-1]) for event in events]


def text_of(events, index=0):
    objects = [json.loads(data[6:]) for _, data in events if data != "data: [DONE]"]
    chunks = [chunk for each in objects for chunk in each["choices"]]
    return "".join(chunk["delta"].get("content") or "" for chunk in chunks if chunk["index"] == index)


def test_the_id_of_an_event_says_where_a_lost_stream_goes_on():
    backend = a_backend(("a", "b", "data: \n\n"), ("b", "data: \n\n"))
    with running(backend) as gateway:
        whole = numbered(gateway, "0")
        assert [event_id for event_id, _ in whole] == ["0", "1", "2", "3", "3", "3"]  # the role, and [DONE] at the end
        assert text_of(whole) == "abdata: \n\n"
        rest = numbered(gateway, "1")
    assert text_of(rest) == "bdata: \n\n"
    assert '"role"' not in rest[0][1]
    assert [body["resume_from"] for body in backend.bodies] == [[0], [1]]
    assert {body["req_id"] for body in backend.bodies} == {"q"}


class Resumed(FakeBackend):
    """Every answer is "abc", the last of it with its end, and goes on where its client was."""

    async def generate(self, body, timeout_s):
        for place in range(3):
            for index, begin in enumerate(body["resume_from"]):
                token = "abc"[place] if place >= begin else ""
                delta_fields = self.delta_fields(body, list("abc")[: max(place, begin)], token) | {"index": index}
                if place == 2:
                    is_end = index == len(body["resume_from"]) - 1
                    yield Final(**delta_fields, **self._end(body, list("abc")), is_end=is_end)
                elif token:
                    yield Delta(**delta_fields)


@pytest.mark.parametrize(("n", "last"), [(1, "0"), (2, "0,0")])
def test_a_stream_that_is_cut_after_any_event_goes_on_with_what_its_client_has_not_seen(n, last):
    fields = {"n": n, "stream_options": {"include_usage": True}}
    with running(Resumed()) as gateway:
        whole = numbered(gateway, last, **fields)
        assert (whole[-1][1], len(whole)) == ("data: [DONE]", 4 * n + 2)
        for num_seen, (event_id, _) in enumerate(whole, 1):
            rest = numbered(gateway, event_id, **fields)
            assert None not in [each for each, _ in (*whole, *rest)]
            for index in range(n):
                assert text_of(whole[:num_seen] + rest, index) == "abc"


def test_the_id_has_a_number_for_each_of_several_answers():
    backend = a_backend(("a", "b"), ("b",))
    with running(backend) as gateway:
        assert [event_id for event_id, _ in numbered(gateway, "0,0", n=2)][:4] == ["0,0", "1,0", "1,0", "1,1"]
        assert text_of(numbered(gateway, "1,1", n=2), 1) == "b"
    assert backend.bodies[1]["resume_from"] == [1, 1]


@pytest.mark.parametrize(("echo", "begin"), [(False, 0), (True, 7)])
def test_the_offsets_of_a_resumed_stream_are_those_in_the_whole_text(echo, begin):
    class Wide(Resumed):
        """The same answer with three characters in each token."""

        def delta_fields(self, body, texts, text):
            fields = super().delta_fields(body, texts, text) | {"token": 3 * text, "text_idx": 3 * len(texts)}
            return fields | {"text_idx": 3 * (len(texts) - 1), "logprobs": (a_logprob(3 * text),)} if text else fields

    def offsets(gateway, last):
        headers = {"Last-Event-ID": last, "X-Request-Id": "q"}
        body = {"model": "m", "prompt": "<s>Hi é", "stream": True, "logprobs": 0, "echo": echo}
        _, _, payload = gateway.send("POST", "/v1/completions", body, headers)
        events = [json.loads(line[6:]) for line in payload.decode().split("\n") if line.startswith("data: {")]
        logprobs = [choice["logprobs"] for each in events for choice in each["choices"] if choice["logprobs"]]
        return [offset for each in logprobs for offset in each["text_offset"]]

    with running(Wide()) as gateway:
        whole = offsets(gateway, "0")
        assert whole[len(whole) - 3 - echo :][:3] == [begin, begin + 3, begin + 6]  # an echo has the stop token as well
        for num_seen in (1, 2):
            assert offsets(gateway, str(num_seen)) == whole[len(whole) - 3 - echo + num_seen :]


def test_the_echo_of_token_ids_is_not_sent_again_and_so_has_no_length():
    with running(FakeBackend("a")) as gateway:
        body = {"prompt": [1, 2], "stream": True, "logprobs": 0, "echo": True}
        headers = {"Last-Event-ID": "1", "X-Request-Id": "q"}
        status, _, payload = gateway.send("POST", "/v1/completions", body, headers)
    error = json.loads(payload)["error"]
    assert (status, error["param"], "cannot be resumed" in error["message"]) == (400, "echo", True)


def test_an_answer_in_one_piece_comes_again_whole():
    backend = a_backend(("a", "b"), ("a", "b"))
    with running(backend) as gateway:
        for last in ("0", "1"):
            headers = {"Last-Event-ID": last, "X-Request-Id": "q"}
            status, _, payload = gateway.send("POST", CHAT, A_CHAT, headers)
            assert (status, json.loads(payload)["choices"][0]["message"]["content"]) == (200, "ab")


@pytest.mark.parametrize(
    ("headers", "fields", "text"),
    [
        ({"Last-Event-ID": "0"}, {}, "with Last-Event-ID the header `X-Request-Id` must name the request"),
        ({"Last-Event-ID": "x", "X-Request-Id": "q"}, {}, 'the header `Last-Event-ID` is "x", expected the id of an'),
        ({"Last-Event-ID": "1", "X-Request-Id": "q"}, {"n": 2}, "with n=2 that is 2 numbers"),
        ({"Last-Event-ID": "1", "X-Request-Id": "q" * 300}, {}, "`X-Request-Id` has 300 characters, the limit"),
    ],
)
def test_a_malformed_id_is_refused_by_name(headers, fields, text):
    with running(FakeBackend("a")) as gateway:
        status, _, payload = gateway.send("POST", CHAT, {**A_CHAT, **fields}, headers)
    assert status == 400
    assert text in json.loads(payload)["error"]["message"]


def test_an_id_beyond_the_end_of_the_answer_is_refused_by_the_name_of_the_header():
    beyond = InvalidRequest("`{field}` is {value}, {limit}", field="resume_from", value=9, limit=3)
    with running(FakeBackend(beyond)) as gateway:
        headers = {"Last-Event-ID": "9", "X-Request-Id": "q"}
        status, _, payload = gateway.send("POST", CHAT, {**A_CHAT, "stream": True}, headers)
    error = json.loads(payload)["error"]
    assert (status, error["param"], error["message"]) == (400, "Last-Event-ID", "`Last-Event-ID` is 9, 3")


def test_only_one_prompt_can_be_gone_on_with():
    with running(FakeBackend("a")) as gateway:
        headers = {"Last-Event-ID": "0", "X-Request-Id": "q"}
        _, _, payload = gateway.send("POST", "/v1/completions", {"prompt": ["a", "b"]}, headers)
    assert json.loads(payload)["error"]["message"] == "with Last-Event-ID the `prompt` must be one, there are 2"


def test_a_stream_with_tools_or_reasoning_cannot_be_resumed():
    with running(FakeBackend("a"), reasoning_parser="ernie") as gateway:
        headers = {"Last-Event-ID": "0", "X-Request-Id": "q"}
        status, _, payload = gateway.send("POST", CHAT, A_CHAT, headers)
    assert (status, "not supported with tools or reasoning" in json.loads(payload)["error"]["message"]) == (400, True)


def test_a_stream_can_be_resumed_if_reasoning_is_turned_off():
    backend = a_backend(("<think>a</think>", "b"), ("b",))
    backend.reasoning = "does"
    with running(backend, reasoning_parser="qwen3") as gateway:
        for last, text in (("0", "<think>a</think>b"), ("1", "b")):
            assert text_of(numbered(gateway, last, enable_thinking=False)) == text


def test_a_request_waits_for_a_model_server_that_was_there_a_moment_ago(monkeypatch):
    monkeypatch.setattr(retry, "RESTART_WITHIN_S", 0.3)
    gone = ModelUnreachable("model server unreachable")
    gone.was_seen_recently = True
    backend = FakeBackend(gone)
    backend.scripts = [(gone,), (gone,), ("a",)]
    with running(backend) as gateway:
        assert gateway.post(CHAT, {"text": "Hi"})["tokens_all"] == "a"
        assert gateway.refused(CHAT, {"text": "Hi"})[0] == 503
