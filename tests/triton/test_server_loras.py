"""Adapters in the whole server: asked for as models, loaded and unloaded while others stream, and through crashes."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.lora_adapters import make_adapter
from tests.patience import in_background, wait_until
from tests.server import ROOT, a_server, running_server
from tests.triton.asking import CHAT, GrpcStream, post

DEMO = ROOT / "demo_model"
NATIVE = {"messages": CHAT, "temperature": 0, "max_dec_len": 20, "ignore_eos": True}
LONG = {"temperature": 0, "max_tokens": 400, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three")):
        make_adapter(folder / name, DEMO, seed, rank=8)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory, adapters):
    settings = {"SERVED_MODEL_NAME": "demo", "MAX_LORAS": "2", "LORA_MODULES": "one=one", "LORA_DIR": str(adapters)}
    with running_server(tmp_path_factory.mktemp("server"), settings) as running:
        yield running


class Answer:
    """A long one, streamed in the background."""

    def __init__(self, client, model):
        self.text = ""
        self._read = in_background(self._read_all, client, model)

    def _read_all(self, client, model):
        for chunk in client.chat.completions.create(model=model, messages=CHAT, stream=True, **LONG):
            self.text += chunk.choices[0].delta.content or ""

    def whole(self):
        self._read.result(120)
        return self.text


def load(server, name):
    """Load an adapter by a path below LORA_DIR."""
    return change(server, "load", lora_name=name, lora_path=name)


def change(server, kind, **body):
    request = urllib.request.Request(f"{server.http_url}/v1/{kind}_lora_adapter", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.read().decode()


def names(client):
    return {model.id: model.parent for model in client.models.list()}


def test_requests_of_the_model_and_of_two_adapters_are_answered_together_as_alone(server, client):
    assert load(server, "two") == "Success: LoRA adapter 'two' added successfully."
    assert names(client) == {"demo": None, "one": "demo", "two": "demo"}
    models = ["default", "one", "two"]
    alone = {model: Answer(client, model).whole() for model in models}
    assert len(set(alone.values())) == 3 and "Paris" in alone["default"]
    together = [(model, Answer(client, model)) for model in models * 4]
    assert all(answer.whole() == alone[model] for model, answer in together)
    status, message = post(server, "/v1/messages", {"model": "one", "messages": CHAT, "max_tokens": 20})
    assert status == 200 and message["model"] == "one"
    _, native = post(server, "/v1/completions", {**NATIVE, "lora_name": "two"})
    assert alone["two"].startswith(native["result"]) and native["result"]
    with pytest.raises(openai.NotFoundError, match=r'The `model` "gpt-4" is not loaded; loaded adapters: \[one, two\]'):
        client.chat.completions.create(model="gpt-4", messages=CHAT)
    assert change(server, "unload", lora_name="two") == "Success: LoRA adapter 'two' removed successfully."


def test_adapters_come_and_go_while_others_and_their_own_answers_stream(server, client):
    expected = {model: Answer(client, model).whole() for model in ("default", "one")}
    running = [(model, Answer(client, model)) for model in ("default", "one")]
    wait_until(lambda: all(answer.text for _, answer in running))  # the adapter is unloaded while it is in use
    load(server, "three")
    with pytest.raises(Exception, match="HTTP Error 400"):
        load(server, "two")  # MAX_LORAS
    change(server, "unload", lora_name="one")
    three = Answer(client, "three")
    with pytest.raises(openai.NotFoundError, match=r"loaded adapters: \[three\]"):
        client.chat.completions.create(model="one", messages=CHAT)
    for model, answer in running:
        assert answer.whole() == expected[model]
    with GrpcStream(server) as stream:
        stream.ask({"load_lora_adapter": {"lora_name": "one", "lora_path": "one"}})
        assert stream.next() == [{"is_end": 1, "lora_names": ["three", "one"]}]
    assert Answer(client, "one").whole() == expected["one"]
    assert three.whole() == Answer(client, "three").whole()
    change(server, "unload", lora_name="three")


@pytest.mark.thorough
def test_a_crash_changes_no_answer_of_an_adapter(server, client):
    load(server, "two")
    expected = {model: Answer(client, model).whole() for model in ("one", "two", "default")}
    for name in ("engine", "stub"):
        running = {model: Answer(client, model) for model in expected}
        wait_until(lambda: all(len(answer.text) > 20 for answer in running.values()))  # noqa: B023
        os.kill(server.pid_of(name), signal.SIGKILL)
        with ThreadPoolExecutor(3) as pool:
            assert dict(zip(running, pool.map(Answer.whole, running.values()), strict=True)) == expected
        assert names(client) == {"demo": None, "one": "demo", "two": "demo"}


def test_a_start_with_an_adapter_that_does_not_fit_says_so(tmp_path, adapters):
    server = a_server(tmp_path, {"LORA_MODULES": "one=one", "LORA_DIR": str(adapters), "MAX_LORA_RANK": "4"})
    started = server.command("start_server")
    assert started.returncode == 2
    assert "adapter_config.json: r is 8, at most MAX_LORA_RANK(4) is supported" in started.stdout + started.stderr
