"""Named keys, aborts and metrics at the gateway: what it tells the model, and what it makes of its answers."""

import asyncio
import json
import logging

import grpc
import pytest

from engine import wire
from engine.errors import InvalidRequest, Overloaded
from engine.wire import ModelState, Owner
from engine.wire.triton import request_of
from server_scripts.probe import Probe
from tests.pure.gateway_fake import FakeBackend, running
from tests.pure.inference_fake import PATIENCE_S, FakeTriton, a_client, a_request, answers, said, serving

CHAT, NATIVE = "/v1/chat/completions", {"text": "hi"}
OPENAI = {"messages": [{"role": "user", "content": "hi"}], "model": "m"}
NO_USAGE = {"num_open_elsewhere": 0, "num_tokens_elsewhere": 0.0, "cached_at": ""}
ALICE = {"name": "alice", "max_requests": 4, "tokens_per_minute": None, "priority": 2, **NO_USAGE}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"alice": {"key": "s3cret", "max_requests": 4, "priority": 2}}))
    return str(path)


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("body", [NATIVE, OPENAI, {**NATIVE, "_owner": {"name": "root"}}, {**NATIVE, "abort": "x"}])
def test_the_model_and_the_log_get_the_owner_of_a_request(body, path, caplog):
    backend = FakeBackend("a")
    with caplog.at_level(logging.INFO), running(backend, api_keys=path, api_key="0perator") as gateway:
        assert gateway.send("POST", CHAT, body, bearer("s3cret"))[0] == 200
        assert gateway.send("POST", CHAT, body, bearer("0perator"))[0] == 200
        assert gateway.send("POST", CHAT, body, bearer("s3cre"))[0] == 401
    assert [each.get("_owner") for each in backend.bodies] == [ALICE, None]
    assert not any("abort" in each for each in backend.bodies)
    lines = [record.getMessage() for record in caplog.records if record.name == "gateway.app"]
    assert [" alice " in line for line in lines] == [True, False, False]
    assert "s3cre" not in caplog.text


@pytest.mark.parametrize("key", wire.GATEWAY_KEYS)
def test_over_http_a_client_cannot_send_what_only_gateways_may(key):
    backend = FakeBackend("a")
    with running(backend) as gateway:
        gateway.post(CHAT, {**NATIVE, key: {"name": "root"}})
    assert key not in backend.bodies[0]


def test_the_probe_of_a_start_has_a_key_of_the_file(path):
    from engine.settings.config import Config

    with running(FakeBackend("a"), api_keys=path) as gateway:
        config = Config(service_host="127.0.0.1", service_http_port=gateway.port, api_keys=path)
        assert "result" in Probe(config).http(gateway.port, "POST", CHAT, json.dumps(NATIVE))


@pytest.mark.parametrize(
    "given",
    [
        b'[{"text": "hi"}]',
        b'{"text": "}"} ',
        b'[{"text": "hi", "_owner": {"name": "root"}}]',
        b'[{"text": "hi", "\\u005fowner": {"name": "root"}}]',
        b"[{}]",
    ],
)
def test_over_grpc_a_request_cannot_claim_another_owner(given):
    for owner in (Owner("alice", 4, None, 2), Owner()):
        body = wire.only_object(wire.payload_with_owner(wire.without_gateway_keys(given), owner))
        assert wire.owner_of(body) == owner
        assert body.get("text") == wire.only_object(given).get("text")


@pytest.mark.parametrize("key", wire.GATEWAY_KEYS)
def test_over_grpc_a_client_cannot_send_what_only_gateways_may(tmp_path, key):
    texts = [json.dumps({"text": "h\u00ef", key: {"about": {}}}).encode(encoding) for encoding in ("utf-8", "utf-16")]
    texts.append(texts[0].replace(key.encode(), b"\\u005f" + key[1:].encode()))
    triton = FakeTriton(said("a"))

    async def scenario():
        async with serving(tmp_path, triton) as (_, port), a_client(port) as stub:
            await answers(stub.ModelStreamInfer(iter([request_of(text) for text in texts])))

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    sent = [wire.only_object(request.raw_input_contents[0][4:]) for request in triton.requests]
    assert sent == [{"text": "h\u00ef"}] * len(texts)


@pytest.mark.parametrize("given", [b"", b"[]", b"{", b"hi", b"\xff"])
def test_a_payload_that_is_not_a_request_is_refused_with_an_owner_too(given):
    with pytest.raises(InvalidRequest):
        wire.only_object(wire.payload_with_owner(given, Owner("alice")))


def test_the_model_gets_the_owner_of_a_request_over_grpc_too(tmp_path, path, caplog):
    triton = []

    async def scenario():
        triton.append(FakeTriton(b"a"))
        async with serving(tmp_path, triton[0], api_keys=path) as (_, port), a_client(port) as stub:
            with pytest.raises(grpc.aio.AioRpcError):
                await answers(stub.ModelStreamInfer(iter([a_request()])))
            metadata = [("authorization", "Bearer s3cret")]
            await answers(stub.ModelStreamInfer(iter([a_request()]), metadata=metadata))

    with caplog.at_level(logging.INFO):
        asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    [request] = triton[0].requests
    assert wire.owner_of(wire.only_object(request.raw_input_contents[0][4:])) == Owner(**ALICE)
    assert any("gRPC stream" in line and " alice 1 requests" in line for line in caplog.messages)


@pytest.mark.parametrize("after", [None, 17])
def test_a_client_over_its_limit_gets_a_retry_time(after):
    error = Overloaded("{value} tokens", value=5)
    error.retry_after_s = after
    with running(FakeBackend(error)) as gateway:
        status, headers, _ = gateway.send("POST", CHAT, NATIVE)
    assert (status, headers["Retry-After"]) == (429, str(after or 1))


def test_an_abort_is_forwarded_with_whose_it_is(path):
    backend = FakeBackend("a")
    with running(backend, api_keys=path, api_key="0perator") as gateway:
        answers = [gateway.send("POST", "/v1/abort", {"req_id": "x"}, bearer(key)) for key in ("s3cret", "0perator")]
    assert [json.loads(payload) for _, _, payload in answers] == [{"is_end": 1, "req_id": "x", "aborted": True}] * 2
    assert backend.aborts == [("x", "alice"), ("x", "")]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "`req_id` is missing"),
        ({"req_id": ["x"]}, "The `req_id` in input parameters must be a string, it is a list"),
    ],
)
def test_an_abort_of_nothing_is_refused(body, message):
    with running(FakeBackend()) as gateway:
        status, answer = gateway.refused("/v1/abort", body)
    assert (status, answer["error_msg"]) == (400, message)


def test_priority_and_timeout_of_openais_requests_reach_the_model():
    backend = FakeBackend("a")
    with running(backend) as gateway:
        gateway.post(CHAT, {**OPENAI, "priority": -2, "timeout": 9})
        status, answer = gateway.refused(CHAT, {**OPENAI, "priority": 101})
    assert (backend.bodies[0]["priority"], backend.bodies[0]["timeout"]) == (-2, 9)
    assert (status, answer["error"]["param"]) == (400, "priority")


SAMPLES = [
    ["llm_requests_running", "gauge", "In the batch", [], 3, ""],
    ["llm_key_requests_total", "counter", "By key", [["key", 'a"b']], 7, ""],
    ["llm_request_seconds", "histogram", "To its end", [["le", "0.1"]], 1, "_bucket"],
    ["llm_request_seconds", "histogram", "To its end", [["le", "+Inf"]], 2, "_bucket"],
    ["llm_request_seconds", "histogram", "To its end", [], 5.25, "_sum"],
    ["llm_request_seconds", "histogram", "To its end", [], 2, "_count"],
]
PAGE = """\
# HELP llm_requests_running In the batch
# TYPE llm_requests_running gauge
llm_requests_running 3
# HELP llm_key_requests_total By key
# TYPE llm_key_requests_total counter
llm_key_requests_total{key="a\\"b"} 7
# HELP llm_request_seconds To its end
# TYPE llm_request_seconds histogram
llm_request_seconds_bucket{le="0.1"} 1
llm_request_seconds_bucket{le="+Inf"} 2
llm_request_seconds_sum 5.25
llm_request_seconds_count 2
"""


def test_the_models_metrics_are_a_page_of_prometheus_with_histograms_that_are_such(path):
    backend = FakeBackend(state=ModelState(ready=True, metrics=SAMPLES))
    with running(backend, api_keys=path) as gateway:
        assert gateway.send("GET", "/metrics")[0] == 401
        status, headers, payload = gateway.send("GET", "/metrics", headers=bearer("s3cret"))
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert payload.decode() == PAGE
