"""Requests that are generated from our own OpenAPI document, correct or nearly so, and sent to a real server: no 500,
no dead process, no traceback in a log, no internals in an answer.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import requests
import schemathesis
from hypothesis import given
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from engine.settings.config import Config
from engine.text.tokenizer import Tokenizer
from gateway.app import make_app
from gateway.app_keys import DOCUMENT
from gateway.triton_connections import SERVICE
from tests.fuzz import INSIDE, bodies, examples, payload_of
from tests.hostile_requests import odd_messages
from tests.triton.server_checks import a_channel, said, unbroken_server

ROOT = Path(__file__).resolve().parents[2]
MAX_DEC_LEN = 8  # so that whatever is asked is answered soon
PATHS = json.loads(json.dumps(make_app(None, Config())[DOCUMENT]()))["paths"]
YES, NO = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
OPERATIONS = [
    (method, path, mode)
    for path, methods in PATHS.items()
    for method, operation in methods.items()
    for mode in ([YES, NO] if "requestBody" in operation else [YES])  # nothing could be wrong where nothing is sent
]
# One path for each description of a POST operation; the others are further names of the same.
NAMED_FIRST = {json.dumps(methods["post"]): path for path, methods in [*PATHS.items()][::-1] if "post" in methods}
CHECKS = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
NEEDED = ("text", "messages", "prompt", "req_id", "tokens", "input", "max_tokens")
ODD = b'[{"text":"Hi","req_id":"odd"}]'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with unbroken_server(tmp_path_factory.mktemp("fuzz"), {"MAX_DEC_LEN": str(MAX_DEC_LEN)}) as running:
        yield running


@pytest.fixture(scope="module")
def session():
    with requests.Session() as session:
        yield session


def check(response):
    assert response.status_code != 500, response.text
    assert [word for word in INSIDE if word in response.text] == []


def few(body):
    """Keep the required fields and some of the optional ones, because this model does not support all of them at
    once.
    """
    return {name: value for index, (name, value) in enumerate(body.items()) if name in NEEDED or index < 4}


@pytest.fixture(scope="module")
def document(server, session):
    return schemathesis.openapi.from_dict(session.get(f"{server.http_url}/openapi.json", timeout=60).json())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: f"{each[0]}-{each[1]}-{each[2].value}")
def test_requests_made_from_the_document_are_answered_as_it_says(server, session, document, operation):
    """Requests match the document in one mode and nearly match it in the other."""
    method, path, mode = operation

    @examples(14 if method == "post" and path in NAMED_FIRST.values() else 4)
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    def ask(case):
        if mode == YES and isinstance(case.body, dict):
            case.body = few(case.body)
        response = case.call(base_url=server.http_url, session=session, timeout=60)
        case.validate_response(response, checks=CHECKS)
        check(response)

    ask()


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"]
)
def test_any_body_is_answered_or_refused(server, session, path):
    @examples(40)
    @given(body=bodies("text", "prompt", "messages", "tools", "stream", "input", "max_tokens"))
    def ask(body):
        check(session.post(f"{server.http_url}{path}", data=payload_of(body), timeout=60))

    ask()


def test_any_odd_message_is_answered_or_refused(server):
    with a_channel(server) as channel:
        stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")

        @examples(100)
        @given(message=odd_messages(ODD))
        def ask(message):
            said(lambda: ["answers", *stream(iter([message, message]), timeout=60)])

        ask()


def test_tokens_over_http_are_those_of_the_model(server, session):
    tokenizer = Tokenizer.load(ROOT / "demo_model")
    for text in ("What is the capital of France?", "", "ä\u2028 <|x|>"):
        reported = session.post(f"{server.http_url}/tokenize", json={"prompt": text}, timeout=60).json()
        assert reported["tokens"] == tokenizer.encode(text)
        back = session.post(f"{server.http_url}/detokenize", json={"tokens": reported["tokens"]}, timeout=60).json()
        assert back == {"prompt": tokenizer.decode(reported["tokens"], skip_special_tokens=False)}


def test_a_chat_is_counted_as_it_is_asked(server, session):
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    counted = session.post(f"{server.http_url}/tokenize", json=chat, timeout=60).json()["count"]
    asked = session.post(f"{server.http_url}/v1/chat/completions", json={**chat, "max_tokens": 1}, timeout=60).json()
    assert asked["usage"]["prompt_tokens"] == counted
