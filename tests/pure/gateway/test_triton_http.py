"""Triton's HTTP protocol on the HTTP port: what tritonclient.http asks, and the generate extension."""

import json

import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from engine.errors import EngineUnavailable, InvalidRequest, Overloaded
from tests.pure.gateway_fake import FakeBackend, events, running

GENERATE = "/v2/models/model/generate"
IN = json.dumps([{"text": "hi", "max_dec_len": 5}])


def test_tritons_own_client_learns_what_there_is_and_that_infer_is_not():
    with running(FakeBackend("a")) as gateway, triton.InferenceServerClient(f"127.0.0.1:{gateway.port}") as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("model")
        assert client.get_server_metadata()["name"] == "triton"
        metadata = client.get_model_metadata("model")
        assert metadata["inputs"] == [{"name": "IN", "datatype": "BYTES", "shape": [1]}]
        assert metadata["outputs"] == [{"name": "OUT", "datatype": "BYTES", "shape": [1]}]
        assert not client.is_model_ready("other")
        with pytest.raises(InferenceServerException, match="unknown model: 'other' is not found"):
            client.get_model_metadata("other")
        tensor = triton.InferInput("IN", [1], "BYTES")
        with pytest.raises(InferenceServerException, match="decoupled transaction policy; POST .*/generate"):
            client.infer("model", [tensor])
    with running(FakeBackend(state=EngineUnavailable("down"))) as gateway:
        with triton.InferenceServerClient(f"127.0.0.1:{gateway.port}") as client:
            assert not client.is_server_live() and not client.is_server_ready() and not client.is_model_ready("model")


def test_tritons_own_client_may_name_the_version():
    with running(FakeBackend("a")) as gateway, triton.InferenceServerClient(f"127.0.0.1:{gateway.port}") as client:
        assert client.is_model_ready("model", "1") and not client.is_model_ready("model", "2")
        assert client.get_model_metadata("model", "1") == client.get_model_metadata("model")
        with pytest.raises(InferenceServerException, match="'model' has no version 2, it is 1"):
            client.get_model_metadata("model", "2")
        assert json.loads(gateway.post("/v2/models/model/versions/1/generate", {"IN": IN})["OUT"])


def test_tritons_own_client_can_print_every_refusal():
    with running(FakeBackend("a"), api_key="secret") as gateway:
        with triton.InferenceServerClient(f"127.0.0.1:{gateway.port}") as client:
            key = {"Authorization": "Bearer secret"}
            for ask in (client.get_inference_statistics, client.get_model_repository_index):
                with pytest.raises(InferenceServerException) as refused:
                    ask(headers=key)
                assert str(refused.value).startswith("[404] ")
            for ask in (client.get_server_metadata, lambda: client.get_model_metadata("model")):
                with pytest.raises(InferenceServerException) as refused:
                    ask()
                assert "the API key is missing or wrong" in str(refused.value)
            with pytest.raises(InferenceServerException, match="decoupled transaction policy"):
                client.infer("model", [triton.InferInput("IN", [1], "BYTES")], model_version="1", headers=key)


def test_generate_answers_once_and_generate_stream_as_it_comes():
    backend = FakeBackend("a", "b")
    with running(backend) as gateway:
        for body in ({"IN": IN}, {"IN": json.dumps({"text": "hi", "n": 2, "req_id": "1"}), "id": "x"}):
            whole = gateway.post(GENERATE, body)
            answers = json.loads(whole.pop("OUT"))
            assert whole == {"model_name": "model", "model_version": "1"}
            assert [each["tokens_all"] for each in answers] == ["ab"] * len(answers)
        reported = events(gateway.stream(f"{GENERATE}_stream", {"IN": IN}))
    assert len(answers) == 2
    assert [json.loads(each["OUT"])[0]["token"] for each in reported] == ["a", "b", ""]
    assert [body.get("return_all_tokens") for body in backend.bodies] == [True, True, None]
    assert backend.bodies[1]["req_id"] == "1"


def test_errors_have_tritons_shape():
    backend = FakeBackend(Overloaded("full"))
    backend.scripts = [("a", EngineUnavailable("gone"))]
    with running(backend) as gateway:
        reported = events(gateway.stream(f"{GENERATE}_stream", {"IN": IN}))
        assert reported[-1] == {"error": "gone"}
        assert gateway.refused(GENERATE, {"IN": IN}) == (429, {"error": "full"})
        for body, text in (
            ({}, "IN must be a text with the request as JSON, it is null"),
            ({"IN": {"text": "x"}}, "IN must be a text"),
            ({"IN": IN, "temperature": 0}, 'unexpected input "temperature", the model has the input IN'),
            ({"IN": "{"}, "IN: the request is not valid JSON"),
            ({"IN": "[]"}, "IN: request data should not be empty and query num 0 should be 1"),
            ({"IN": '{"text": "x", "timeout": -1}'}, "timeout"),
        ):
            code, error = gateway.refused(GENERATE, body)
            assert (code, set(error)) == (400, {"error"}) and text in error["error"], error


def test_health_needs_no_key_and_the_rest_does():
    with running(FakeBackend("a"), api_key="secret") as gateway:
        assert gateway.send("GET", "/v2/health/ready")[0] == gateway.send("GET", "/v2/health/live")[0] == 200
        assert gateway.send("GET", "/v2")[0] == gateway.send("POST", GENERATE, {"IN": IN})[0] == 401
        assert gateway.send("POST", GENERATE, {"IN": IN}, {"Authorization": "Bearer secret"})[0] == 200


# --- as clients of Triton's vLLM and TensorRT-LLM backends ask ---


def test_a_refusal_by_the_model_names_the_field_of_the_client():
    backend = FakeBackend(InvalidRequest("The `{field}` is empty", field="text", value=""))
    too_large = InvalidRequest("`{field}` is {value}", field="max_dec_len", value=5)
    backend.scripts = [(too_large,), (too_large,)]
    with running(backend) as gateway:
        for body in ({"text_input": "a", "max_tokens": 5}, {"IN": '{"text": "a", "max_tokens": 5}'}):
            assert gateway.refused(GENERATE, body) == (400, {"error": "`max_tokens` is 5"})
        assert gateway.refused(GENERATE, {"text_input": ""}) == (400, {"error": "The `text_input` is empty"})


def test_a_text_with_parameters_is_answered_with_a_text():
    backend = FakeBackend("a", "b", finish_reason="length")
    envelope = {"model_name": "model", "model_version": "1"}
    with running(backend) as gateway:
        asked = {"text_input": "hi", "parameters": {"max_tokens": 9000, "temperature": 0}, "stream": False}
        assert gateway.post(GENERATE, asked) == {**envelope, "text_output": "ab", "finish_reason": "length"}
        several = gateway.post(GENERATE, {"text_input": "hi", "n": 2})
        assert several == {**envelope, "text_output": ["ab", "ab"], "finish_reason": ["length", "length"]}
        for fields in ({}, {"stream": True}):
            reported = events(gateway.stream(f"{GENERATE}_stream", {**asked, "stream": None, **fields}))
            assert [each["text_output"] for each in reported] == ["a", "b", ""]
        gateway.stream(f"{GENERATE}_stream", asked)
    assert reported[0] == {**envelope, "text_output": "a", "index": 0}
    assert reported[-1] == {**envelope, "text_output": "", "index": 0, "finish_reason": "length"}
    assert [body["return_all_tokens"] for body in backend.bodies] == [True, True, False, False, True]
    expected = {"text": "hi", "max_tokens": 9000, "temperature": 0, "cut_max_dec_len": True}
    assert backend.bodies[0] == {**expected, "return_all_tokens": True, "req_id": backend.bodies[0]["req_id"]}


def test_the_names_of_other_backends_are_understood():
    backend = FakeBackend("a")
    asked = {"text_input": "hi", "max_tokens": 5, "stop_words": ["x", ""], "bad_words": [""]}
    with running(backend) as gateway:
        gateway.post(GENERATE, {**asked, "parameters": {"max_completion_tokens": 7, "max_tokens": 2000, "seed": None}})
    [body] = backend.bodies
    assert {**body, "max_tokens": 7, "stop_sequences": ["x"]} == body
    assert not {"bad_words", "stop_words", "max_completion_tokens", "seed"} & body.keys()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"text_input": 5}, "text_input"),
        ({"parameters": [1]}, "parameters"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True}, "`stream` is true, which is for generate_stream"),
        ({"parameters": {"text": "other"}}, "`text` is not supported beside `text_input`"),
        ({"logprobs": 0}, "`logprobs` is not supported beside `text_input`"),
    ],
)
def test_unsupported_parameters_of_a_text_are_refused_by_name(fields, text):
    with running(FakeBackend("a")) as gateway:
        status, answer = gateway.refused(GENERATE, {"text_input": "hi", **fields})
    assert (status, text in answer["error"]) == (400, True), answer
