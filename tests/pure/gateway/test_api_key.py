"""API key: which paths require it, and that it is never passed on or logged."""

import contextlib
import json
import logging
import sys
from pathlib import Path

import openai
import pytest

from engine.settings.config import Config
from gateway import __main__ as gateway_main
from server_scripts import demo
from server_scripts.probe import Probe, ProbeError
from server_scripts.run_dir import Process, ServerState
from tests.pure.gateway_fake import FakeBackend, running

CHAT, NATIVE = "/v1/chat/completions", {"text": "hi"}
KEY = "s3cret-key"


@pytest.fixture(scope="module")
def gateway():
    with running(FakeBackend("a"), api_key=KEY) as gateway:
        yield gateway


@pytest.mark.parametrize("given", [f"Bearer {KEY}", f"bearer  {KEY} "])
def test_a_client_with_the_key_is_answered(gateway, given):
    assert gateway.send("POST", CHAT, NATIVE, {"Authorization": given})[0] == 200
    assert gateway.send("GET", "/v1/models", headers={"Authorization": given})[0] == 200


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer \xff"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", CHAT), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/"), ("GET", "/no"), ("GET", CHAT)],
)
def test_a_client_without_the_key_is_refused_in_openais_shape(gateway, caplog, method, path, given):
    with caplog.at_level(logging.INFO):
        headers = {} if given is None else {"Authorization": given}
        status, headers, payload = gateway.send(method, path, NATIVE if method == "POST" else None, headers)
    error = json.loads(payload)["error"]
    assert (status, headers["WWW-Authenticate"], set(json.loads(payload))) == (401, "Bearer", {"error"})
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert KEY not in payload.decode() + caplog.text


def test_health_and_what_a_browser_asks_before_need_no_key(gateway):
    assert gateway.send("GET", "/health")[0] == 200
    assert gateway.send("OPTIONS", CHAT)[0] == 204


def test_openais_client_has_a_name_for_it(gateway):
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    for key, expected in ((KEY, contextlib.nullcontext()), ("none", pytest.raises(openai.AuthenticationError))):
        with openai.Client(base_url=gateway.url + "/v1", api_key=key, max_retries=0) as client, expected:
            assert client.chat.completions.create(**chat).choices[0].message.content == "a"


def test_the_probe_of_a_start_has_the_key(gateway):
    config = Config(service_host="127.0.0.1", service_http_port=gateway.port, api_key=KEY)
    assert "result" in Probe(config).http(gateway.port, "POST", CHAT, json.dumps(NATIVE))
    with pytest.raises(ProbeError, match="401"):
        Probe(Config(service_host="127.0.0.1", service_http_port=gateway.port)).http(gateway.port, "GET", "/")


def test_no_other_port_gets_the_api_key(gateway):
    config = Config(service_host="127.0.0.1", service_http_port=1, health_http_port=gateway.port, api_key=KEY)
    with pytest.raises(ProbeError, match="401"):
        Probe(config).http(gateway.port, "GET", "/v1/models")


def test_the_demo_has_the_key_and_its_examples_name_the_variable(gateway):
    names = "SERVICE_HTTP_PORT", "SERVICE_GRPC_PORT", "HEALTH_HTTP_PORT", "METRICS_HTTP_PORT"
    ports = dict.fromkeys(names, gateway.port)
    state = ServerState("ready", Process("supervisor", 1, 0), 0.0, "m", "127.0.0.1", ports, "log", 1.0)
    assert "".join(demo.answer(state, {"text": "hi"}, Config(api_key=KEY))) == "a"
    run_path = Path("/run/mine")
    assert 'completions -H "Authorization: Bearer $API_KEY" \\\n' in demo.how_to_go_on(state, run_path, with_key=True)
    assert "Authorization" not in demo.how_to_go_on(state, run_path)


def test_the_demo_prints_a_stop_command_that_names_the_folder_of_its_server():
    ports = {"SERVICE_HTTP_PORT": 1, "SERVICE_GRPC_PORT": 2}
    state = ServerState("ready", Process("supervisor", 1, 0), 0.0, "m", "127.0.0.1", ports, "log", 1.0)
    assert f"Stop it: RUN_DIR=/run/mine {demo.command('stop_server')}" in demo.how_to_go_on(state, Path("/run/mine"))


@pytest.mark.slow
def test_a_worker_takes_the_key_from_its_environment(monkeypatch):
    monkeypatch.setenv("API_KEY", KEY)
    seen = []

    async def run(config):
        seen.append(config)

    monkeypatch.setattr(gateway_main, "run", run)
    monkeypatch.setattr(sys, "argv", ["gateway"])
    monkeypatch.setattr(gateway_main, "configure", lambda level, process: None)
    assert gateway_main.main() == 0
    assert seen[0].api_key == KEY
    assert KEY not in repr(seen[0])
