"""Adapters over HTTP: asked for as models, listed, loaded and unloaded."""

import json
import threading

import openai
import pytest

from engine.errors import InvalidRequest, UnknownModel
from engine.wire import ModelState
from gateway import retry
from gateway.backend import ModelLost, ModelUnreachable
from tests.pure.gateway_fake import FakeBackend, openai_client, running

MESSAGES = [{"role": "user", "content": "Hi"}]
ASKING = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": ["Hi", "Ho"]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
}
HAS_SOME = {"lora_modules": "one=/adapters/one", "served_model_name": "base"}
UNKNOWN = UnknownModel(
    "The `{field}` {value} is not loaded; loaded adapters: {limit}", field="lora_name", value='"x"', limit=["one"]
)


@pytest.mark.parametrize("path", ASKING)
def test_a_model_that_is_not_the_servers_own_is_an_adapter(path):
    backend = FakeBackend("Bonjour")
    with running(backend, **HAS_SOME) as gateway:
        for model in ("one", "base", "default", ""):
            answer = gateway.post(path, {**ASKING[path], "model": model})
            assert answer["model"] == (model or "base")
            asked = [body.pop("lora_name", None) for body in backend.bodies]
            assert asked == [model if model == "one" else None] * (2 if "prompt" in ASKING[path] else 1)
            backend.bodies.clear()


@pytest.mark.parametrize("path", [*ASKING, "/v1/embeddings"])
def test_one_that_is_unknown_is_a_404_that_names_the_field_and_what_there_is(path):
    with running(FakeBackend(UNKNOWN), **HAS_SOME) as gateway:
        status, answer = gateway.refused(path, {**ASKING.get(path, {"input": "Hi"}), "model": "x"})
    assert status == 404
    assert answer["error"]["message"] == 'The `model` "x" is not loaded; loaded adapters: [one]'


def test_a_server_without_adapters_takes_any_model_as_its_own():
    backend = FakeBackend("Bonjour")
    with running(backend) as gateway:
        gateway.post("/v1/chat/completions", {"messages": MESSAGES, "model": "gpt-4"})
    assert "lora_name" not in backend.bodies[0]


def test_a_native_request_names_it_in_a_field_of_its_own():
    backend = FakeBackend("Bonjour")
    with running(backend, **HAS_SOME) as gateway:
        gateway.post("/v1/chat/completions", {"messages": MESSAGES, "lora_name": "one", "model": "x"})
        status, answer = gateway.refused("/v1/completions", {"prompt": "Hi", "lora_name": "one"})
    assert backend.bodies[0]["lora_name"] == "one"
    assert (status, "`lora_name` is a field of another protocol, its name here is `model`" in str(answer)) == (
        400,
        True,
    )


def test_models_are_the_servers_own_and_its_adapters_with_their_parent():
    backend = FakeBackend(state=ModelState(ready=True, model_len=100, loras=["one", "a/b"]))
    with running(backend, **HAS_SOME) as gateway, openai_client(gateway) as client:
        reported = [(each.id, each.parent, each.max_model_len) for each in client.models.list()]
        assert reported == [("base", None, 100), ("one", "base", 100), ("a/b", "base", 100)]
        assert client.models.retrieve("a/b").parent == "base"
        status, _, body = gateway.send("GET", "/v1/models/two")
    assert status == 404 and "the served models are `base`, `one`, `a/b`" in body.decode()


def test_all_names_of_the_model_are_listed_and_requested_and_the_first_one_answers():
    names = {"lora_modules": "one=/adapters/one", "served_model_name": "base, org/other,base"}
    backend = FakeBackend("Bonjour", state=ModelState(ready=True, loras=["one"]))
    with running(backend, **names) as gateway, openai_client(gateway) as client:
        reported = {each.id: (each.root, each.parent) for each in client.models.list()}
        assert reported == {"base": ("base", None), "org/other": ("base", None), "one": ("one", "base")}
        assert client.models.retrieve("org/other").id == "org/other"
        for name in ("base", "org/other", "default"):
            answer = client.chat.completions.create(model=name, messages=MESSAGES)
            assert answer.model == ("default" if name == "default" else "base")
            assert "lora_name" not in backend.bodies.pop()
        assert client.chat.completions.create(model="one", messages=MESSAGES).model == "one"
        assert backend.bodies.pop()["lora_name"] == "one"
        status, answer = gateway.refused("/v1/load_lora_adapter", {"lora_name": "org/other", "lora_path": "x"})
        assert (status, answer["error"]["message"]) == (400, 'The `lora_name` "org/other" is the model\'s own')


@pytest.mark.slow
def test_a_list_of_models_waits_for_a_model_server_that_has_died_rather_than_to_lack_its_adapters(monkeypatch):
    monkeypatch.setattr(retry, "CHECK_EVERY_S", 0.01)
    back, gone = ModelState(ready=True, loras=["one"]), ModelUnreachable("model server unreachable")
    for lost, is_reported in ((ModelLost("gone"), True), (gone, False)):
        backend = FakeBackend(state=lost)
        with running(backend, **HAS_SOME) as gateway, openai_client(gateway) as client:
            returns = threading.Timer(0.3, lambda backend=backend: setattr(backend, "state", back))
            returns.start()
            if is_reported:
                assert [each.id for each in client.models.list()] == ["base", "one"]
            else:  # it was never there
                with pytest.raises(openai.InternalServerError, match="model server unreachable"):
                    client.models.list()
            returns.join()


def test_loading_and_unloading_are_vllms():
    backend = FakeBackend()
    asked = {"lora_name": "one", "lora_path": "folder"}
    with running(backend, lora_dir="/adapters") as gateway:
        status, headers, body = gateway.send("POST", "/v1/load_lora_adapter", asked)
        assert (status, headers.get_content_type()) == (200, "text/plain")
        assert body == b"Success: LoRA adapter 'one' added successfully."
        assert gateway.send("POST", "/v1/unload_lora_adapter", {"lora_name": "one"})[2] == (
            b"Success: LoRA adapter 'one' removed successfully."
        )
    assert backend.bodies == [{"load_lora_adapter": asked}, {"unload_lora_adapter": {"lora_name": "one"}}]


def test_the_owner_of_the_api_key_is_forwarded_and_without_one_nothing_is_loaded(tmp_path):
    (tmp_path / "keys").write_text(json.dumps({"somebody": {"key": "secret"}}))
    backend, asked = FakeBackend(), {"lora_name": "one", "lora_path": "x", "_owner": {"name": ""}}
    with running(backend, lora_dir="/adapters", api_keys=str(tmp_path / "keys")) as gateway:
        assert gateway.send("POST", "/v1/load_lora_adapter", asked)[0] == 401
        assert gateway.send("POST", "/v1/load_lora_adapter", asked, {"Authorization": "Bearer secret"})[0] == 200
    [body] = backend.bodies
    assert body["_owner"]["name"] == "somebody"


def test_refusals_have_openais_shape():
    backend = FakeBackend(InvalidRequest("The `{field}` x is not in LORA_DIR", field="lora_path", value="x"))
    with running(backend, lora_dir="/adapters", served_model_name="base") as gateway:
        for body, message in (
            ({"lora_name": "one", "lora_path": "x"}, "The `lora_path` x is not in LORA_DIR"),
            ({"lora_name": "base", "lora_path": "x"}, 'The `lora_name` "base" is the model\'s own'),
            (
                {"lora_name": 7, "lora_path": "x"},
                "The `lora_name` in input parameters must be a string, it is a number",
            ),
        ):
            status, answer = gateway.refused("/v1/load_lora_adapter", body)
            assert (status, answer["error"]["message"]) == (400, message)
