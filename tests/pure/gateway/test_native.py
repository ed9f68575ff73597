"""The native protocol over HTTP, and which bodies are native."""

import contextlib
import json

import pytest

from engine.errors import DuplicateRequest, EngineUnavailable, InvalidRequest
from gateway.native.request import is_native
from tests.pure.gateway_fake import FakeBackend, running

CHAT = "/v1/chat/completions"
DOCUMENTED_TEXT = {"text": "Hello, how are you?", "req_id": "abc", "max_dec_len": 64, "stream": True}
KEYS = {"req_id", "token", "token_ids", "send_idx", "is_end", "usage", "infer_seed", "error_msg", "error_code"}
DOCUMENTED_MESSAGES = {
    "messages": [
        {"role": "user", "content": "Hello, who are you"},
        {"role": "system", "content": "I'm a helpful AI assistant."},
        {"role": "user", "content": "List 3 countries and their capitals."},
    ],
    "req_id": "abc",
    "max_dec_len": 64,
    "stream": True,
}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("body", [DOCUMENTED_TEXT, DOCUMENTED_MESSAGES, {"input_ids": [1, 2], "stream": True}])
def test_a_native_stream_is_one_object_a_line_and_one_line_a_chunk(path, body):
    backend = FakeBackend("Bonjour", " 你好")
    with running(backend) as gateway:
        chunks = gateway.stream(path, body)
    lines = [json.loads(chunk) for chunk in chunks]
    assert all(chunk.endswith(b"\n") and chunk.count(b"\n") == 1 for chunk in chunks)
    assert [line["token"] for line in lines] == ["Bonjour", " 你好", ""]
    assert [line["is_end"] for line in lines] == [0, 0, 1]
    assert [line["send_idx"] for line in lines] == [0, 1, 2]
    assert all(line["error_msg"] == "" and line["error_code"] == 0 for line in lines)
    assert lines[-1]["tokens_all"] == "Bonjour 你好"
    assert "你好".encode() in chunks[1]  # readable in a terminal


def test_the_model_gets_the_body_as_the_client_wrote_it():
    backend = FakeBackend("a")
    with running(backend) as gateway:
        gateway.stream(CHAT, DOCUMENTED_MESSAGES)
    assert backend.bodies == [DOCUMENTED_MESSAGES]


def test_a_native_answer_in_one_piece_has_the_documented_and_the_real_key():
    with running(FakeBackend("Hel", "lo")) as gateway:
        answer = gateway.post(CHAT, {"text": "hi", "req_id": "abc"})
    assert answer == {
        "req_id": "abc",
        "index": 0,
        "result": "Hello",
        "tokens_all": "Hello",
        "tokens_all_ids": [0, 1],
        "tokens_all_num": 2,
        "finish_reason": "stop",
        "stop_reason": None,
        "inference_time_cost": 0.25,
        "infer_seed": 3,
        "return_all_tokens": False,
        "error_msg": "",
        "error_code": 0,
    }


def test_usage_and_logprobs_are_in_the_answer_when_asked_for():
    with running(FakeBackend("Hel", "lo")) as gateway:
        answer = gateway.post(CHAT, {"text": "hi", "return_usage": True, "logprobs": 0})
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 4}
    assert [token["token"] for token in answer["logprobs"]] == ["Hel", "lo"]


def test_a_request_without_an_id_gets_one_of_its_own():
    backend = FakeBackend("a")
    with running(backend) as gateway:
        ids = [gateway.post(CHAT, {"text": "hi"})["req_id"] for _ in range(2)]
    assert len(set(ids)) == 2
    assert [body["req_id"] for body in backend.bodies] == ids


def test_a_client_cannot_probe_instead_of_asking():
    backend = FakeBackend("a")
    with running(backend) as gateway:
        gateway.post(CHAT, {"text": "hi", "probe": True})
    assert "probe" not in backend.bodies[0]


def test_benchmark_requests_learn_when_they_were_received():
    with running(FakeBackend("a")) as gateway:
        [line, _] = gateway.stream(CHAT, {"text": "hi", "stream": True, "benchmark": True})
    assert float(json.loads(line)["http_received_time"]) > 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("The `topp` must be in [0, 1]"), 400),
        (InvalidRequest("The `{field}` is {value} of {limit}", field="topp", value=2, limit=[0, 1]), 400),
        (DuplicateRequest("twice"), 409),
        (EngineUnavailable("gone"), 503),
    ],
)
def test_a_refusal_keeps_its_status_and_has_the_native_error_object(stream, error, status):
    with running(FakeBackend(error)) as gateway:
        got, answer = gateway.refused(CHAT, {"text": "hi", "req_id": "abc", "stream": stream})
    assert got == status
    timestamp = answer.pop("timestamp")
    assert timestamp > 0
    assert answer == {
        "req_id": "abc",
        "error_msg": str(error),
        "error_code": status,
        "error_type": error.kind,
        "version": "4.6",
        "result": "",
        **{"index": 0, "is_end": 1, "token": "", "token_ids": [], "send_idx": 0, "infer_seed": None},
        "usage": {"prompt_tokens": 0, "completion_tokens": 0},
        **{f"error_{name}": value for name, value in error.cause.items()},
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"max_tokens": 5, "min_dec_len": 9}, "min_dec_len of max_tokens"),
        ({"max_tokens": 5, "max_dec_len": 5, "min_tokens": 9}, "min_tokens of max_dec_len"),  # which takes precedence
    ],
)
def test_a_refusal_has_the_names_by_which_the_client_has_called_the_fields(body, names, stream):
    error = InvalidRequest("{field} of {max_dec_len}", field="min_dec_len", value=9)
    with running(FakeBackend(error)) as gateway:
        _, failure = gateway.refused(CHAT, {"text": "hi", "stream": stream, **body})
    assert (failure["error_msg"], failure["error_field"]) == (names, "min_dec_len")


def test_an_error_after_the_first_token_is_the_last_line():
    with running(FakeBackend("Hel", EngineUnavailable("the engine has crashed"))) as gateway:
        lines = [json.loads(line) for line in gateway.stream(CHAT, DOCUMENTED_TEXT)]
    assert [line["error_code"] for line in lines] == [0, 503]
    assert lines[-1]["error_msg"] == "the engine has crashed"
    assert all(set(line) >= KEYS for line in lines)
    assert (lines[-1]["is_end"], lines[-1]["token"], lines[-1]["send_idx"]) == (1, "", 1)


def test_a_stream_of_several_choices_says_of_each_line_whose_it_is_and_ends_once():
    with running(FakeBackend("Hel", "lo")) as gateway:
        lines = [json.loads(line) for line in gateway.stream(CHAT, {**DOCUMENTED_TEXT, "n": 2})]
    assert [line["index"] for line in lines] == [0, 1] * 3
    assert [line["is_end"] for line in lines] == [0] * 5 + [1]
    assert [line["tokens_all"] for line in lines if "finish_reason" in line] == ["Hello", "Hello"]


def test_several_choices_in_one_piece_are_the_first_one_and_a_list_of_all():
    backend = FakeBackend("Hel", "lo")
    body = {"text": "hi", "req_id": "abc", "return_usage": True, "logprobs": 0}
    with running(backend) as gateway:
        one = gateway.post(CHAT, body)
        answer = gateway.post(CHAT, {**body, "n": 3})
    choices = answer.pop("choices")
    assert choices == [{**one, "index": index} for index in range(3)]
    assert answer == {**one, "usage": {**one["usage"], "completion_tokens": 6}}
    assert [body.get("n") for body in backend.bodies] == [None, 3]


def test_an_error_among_several_choices_is_the_last_line_and_counts_them_all():
    with running(FakeBackend("Hel", EngineUnavailable("gone"))) as gateway:
        lines = [json.loads(line) for line in gateway.stream(CHAT, {**DOCUMENTED_TEXT, "n": 2})]
    assert [line["error_code"] for line in lines] == [0, 0, 503]
    assert (lines[-1]["is_end"], lines[-1]["send_idx"]) == (1, 2)
    assert lines[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 4}


def test_a_bug_of_ours_does_not_show_its_insides():
    with running(FakeBackend(KeyError("secret"))) as gateway:
        status, answer = gateway.refused(CHAT, {"text": "hi"})
    assert status == 500
    assert answer["error_msg"] == "internal error of the gateway"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stream", "yes", 'The `stream` must be a boolean, it is "yes"'),
        ("timeout", "soon", 'The `timeout` must be in [0, 1e+09], it is "soon"'),
        ("return_usage", [], "The `return_usage` must be a boolean, it is []"),
    ],
)
def test_the_fields_that_act_in_the_gateway_are_checked_there(field, value, message):
    with running(FakeBackend("a")) as gateway:
        status, answer = gateway.refused(CHAT, {"text": "hi", field: value})
    assert (status, answer["error_msg"]) == (400, message)


def test_the_documented_example_works_with_requests():
    requests = pytest.importorskip("requests")
    with running(FakeBackend("a", "b")) as gateway, contextlib.closing(requests.Session()) as session:
        response = session.post(gateway.url + CHAT, json=DOCUMENTED_TEXT, stream=True)
        tokens = [json.loads(line)["token"] for line in response.iter_lines()]
    assert tokens == ["a", "b", ""]


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (DOCUMENTED_TEXT, True),
        (DOCUMENTED_MESSAGES, True),
        ({"input_ids": [1]}, True),
        ({"text": "hi", "model": "default"}, True),
        ({"messages": MESSAGES, "topp": 0.5}, True),
        ({"messages": MESSAGES, "return_usage": True, "model": "default"}, True),
        ({"messages": MESSAGES, "timeout": 5}, True),
        ({"messages": MESSAGES, "timeout": 5, "model": "default"}, False),
        ({"messages": MESSAGES, "req_id": None}, False),
        ({"messages": MESSAGES}, False),
        ({"messages": MESSAGES, "n": 2}, False),
        ({"messages": MESSAGES, "temperature": 0, "max_tokens": 64, "stream": True, "model": "default"}, False),
        ({"prompt": "hi", "req_id": "abc"}, False),
        ({}, False),
    ],
)
def test_the_fields_decide_which_protocol_a_body_speaks(body, expected):
    assert is_native(body) is expected
