"""vLLM's /generate: texts that begin with the prompt, whole or as lines of JSON, each with everything so far."""

import json

import pytest

from tests.pure.gateway_fake import FakeBackend, running

BACKEND = FakeBackend("Hel", "lo", "!")


@pytest.fixture(scope="module")
def gateway():
    with running(BACKEND) as gateway:
        yield gateway


def test_an_answer_is_the_prompt_and_its_continuation(gateway):
    assert gateway.post("/generate", {"prompt": "Say: ", "temperature": 0}) == {"text": ["Say: Hello!"]}
    sent = BACKEND.bodies[-1]
    assert (sent["text"], sent["max_tokens"], sent["temperature"], sent["top_p"]) == ("Say: ", 16, 0, 1.0)
    assert sent["apply_chat_template"] is False


def test_null_means_that_a_field_is_absent(gateway):
    absent = dict.fromkeys(("logprobs", "prompt_logprobs", "stream_options", "max_tokens", "stream"))
    assert gateway.post("/generate", {"prompt": "Say: ", **absent}) == {"text": ["Say: Hello!"]}


def test_each_line_of_a_stream_has_the_text_so_far(gateway):
    stream = b"".join(gateway.stream("/generate", {"prompt": "> ", "stream": True}))
    lines = [json.loads(line) for line in stream.splitlines()]
    assert [line["text"] for line in lines[:3]] == [["> Hel"], ["> Hello"], ["> Hello!"]]
    assert lines[3:] == lines[2:3]  # the end, which has no text of its own


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "a", "logprobs": 2}, "use /v1/completions"),
        ({"inputs": "a", "parameters": {}}, "`prompt`"),
        ({"prompt": "a", "temperatur": 0}, "temperature"),
        ({"prompt": "a", "n": 0}, "n"),
    ],
)
def test_unsupported_fields_are_refused_by_name(gateway, body, words):
    status, answer = gateway.refused("/generate", body)
    assert status == 400 and words in answer["error"]["message"]
