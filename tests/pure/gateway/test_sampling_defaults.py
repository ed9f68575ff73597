"""Tests of the defaults of sampling parameters that a model's generation_config.json has."""

import json

import pytest

from engine.settings.config import Config
from engine.settings.served import SERVED_FILE, Served
from gateway.openai.sampling_defaults import sampling_defaults_of
from tests.pure.gateway_fake import FakeBackend, running

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": 2}
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
DEFAULTS = {name: QWEN[name] for name in NAMES if name in QWEN}
OPENAI = {"temperature": 1.0, "top_p": 1.0}
CHAT = "/v1/chat/completions"
A_CHAT = {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}


def model_with(folder, **parameters):
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(parameters))
    return {"graph_dir": str(folder)}


def sent(settings, path=CHAT, **fields):
    """Return the sampling parameters that the model gets."""
    backend = FakeBackend("a")
    with running(backend, **settings) as gateway:
        status, _, text = gateway.send("POST", path, fields)
        assert status == 200, text
    [body] = backend.bodies
    return {name: body[name] for name in NAMES if name in body}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, A_CHAT),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {**A_CHAT, "max_tokens": 5}),
    ],
)
def test_a_request_without_them_gets_those_of_the_model(tmp_path, path, fields):
    settings = model_with(tmp_path, **QWEN)
    assert sent(settings, path, **fields) == DEFAULTS
    assert sent(settings, path, **fields, temperature=0, top_k=None) == {**DEFAULTS, "temperature": 0}
    assert sent({**settings, "generation_config": "none"}, path, **fields) == OPENAI


def test_native_requests_and_a_beam_search_get_none(tmp_path):
    settings = model_with(tmp_path, **QWEN)
    assert sent(settings, text="Hi") == {}
    assert sent(settings, **A_CHAT, use_beam_search=True) == OPENAI


def test_values_that_no_request_may_have_are_left_out(tmp_path):
    settings = model_with(tmp_path, temperature=-1, top_p=None, top_k="x", min_p=0.1)
    assert sampling_defaults_of(Config(**settings)) == {"min_p": 0.1}
    assert sampling_defaults_of(Config(graph_dir=str(tmp_path / "none"))) == {}


def test_after_a_reload_they_are_those_of_the_new_model(tmp_path):
    settings = model_with(tmp_path / "old", temperature=0.5)
    new = model_with(tmp_path / "new", temperature=0.6)
    (tmp_path / SERVED_FILE).write_text(Served("new id", "new", **new).text())
    assert sent({**settings, "run_dir": str(tmp_path)}, **A_CHAT)["temperature"] == 0.6


def test_vllms_name_of_openais_defaults_is_known():
    assert Config.from_env({"GENERATION_CONFIG": "vllm"}).generation_config == "none"
