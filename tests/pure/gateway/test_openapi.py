"""The OpenAPI document and its page: made of the code, so complete, and open to everybody."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest

from engine import __version__, wire
from engine.errors import KINDS, InvalidRequest, Overloaded
from engine.settings.config import Config
from gateway.app import make_app
from gateway.app_keys import DOCUMENT
from gateway.openai.request import FORWARDED_FIELDS, PROMPT_OUTPUT_FIELDS, STREAM_OPTIONS, TEMPLATE_FLAGS
from tests.pure.gateway_fake import FakeBackend, running

ROOT = Path(__file__).parents[3]
CHAT_ONLY = {"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "include_reasoning", *TEMPLATE_FLAGS}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def document():
    return json.loads(json.dumps(make_app(None, Config())[DOCUMENT]()))


def schema_of(document, path, protocol, kind="request"):
    return document["components"]["schemas"][f"{protocol}{path.replace('/', '.')}.{kind}"]


def is_valid(document, schema, value):
    jsonschema.validate(value, {**schema, "components": document["components"]})


def test_every_route_is_in_it_with_a_summary_and_no_other(document):
    routes = {(r.method.lower(), r.resource.canonical) for r in make_app(None, Config()).router.routes()}
    reported = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert reported == {(method, path) for method, path in routes if method != "head"}
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert [each for each in operations if not re.fullmatch(r"[A-Z].*\.", each["summary"])] == []


def test_every_native_field_is_in_it_with_its_aliases_what_it_holds_and_means(document):
    reported = schema_of(document, CHAT, "native")["properties"]
    assert set(reported) == {key for name, field in wire.FIELDS.items() for key in (name, *field.aliases)}
    assert [name for name, schema in reported.items() if not schema.get("description")] == []
    assert [name for name, schema in reported.items() if not {"type", "anyOf", "enum"} & set(schema)] == ["model"]
    assert reported["topp"]["maximum"] == 1 and reported["topp"]["default"] == 0.7
    assert reported["top_p"]["x-alias-of"] == "topp"


def test_a_response_in_the_background_has_no_usage_yet(document):
    usage = schema_of(document, "/v1/responses", "responses", "answer")["properties"]["usage"]
    is_valid(document, usage, None)


@pytest.mark.parametrize("embedding", [[0.5, -1.0], "AAAAPwAAgL8="])
def test_embeddings_are_numbers_or_if_asked_for_base64(document, embedding):
    data = schema_of(document, "/v1/embeddings", "embeddings", "answer")["properties"]["data"]
    is_valid(document, data, [{"object": "embedding", "index": 0, "embedding": embedding}])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_field_of_openai_that_is_passed_on_or_acts_in_the_gateway_is_in_it(document, path):
    source = "".join((ROOT / "gateway/openai" / name).read_text() for name in ("request.py", "prompts.py", "tools.py"))
    acting = {*TEMPLATE_FLAGS, *re.findall(r'(?:_checked\(body, |body\.get\()"(\w+)"', source)} | {
        "max_tokens",
        "max_completion_tokens",
    }
    assert len(acting) > 8
    reported = set(schema_of(document, path, "openai")["properties"])
    elsewhere = {"top_logprobs", "messages", *CHAT_ONLY} if path == COMPLETIONS else {"echo", "prompt"}
    refused = {"store"}  # only /v1/responses stores answers
    assert reported == ({*acting, *FORWARDED_FIELDS, *PROMPT_OUTPUT_FIELDS, "prompt"} - elsewhere - refused)
    options = STREAM_OPTIONS
    assert set(schema_of(document, path, "openai")["properties"]["stream_options"]["properties"]) == set(options)


def test_every_status_of_an_error_is_in_it(document):
    codes = {str(error.code) for error in KINDS.values()} | {"200", "401", "408", "413"}
    assert set(document["paths"][CHAT]["post"]["responses"]) == codes


@pytest.mark.slow
@pytest.mark.parametrize("wrong_key", [False, True])
def test_answers_and_errors_are_of_the_shapes_that_it_says(document, wrong_key):
    headers = {"Authorization": "Bearer wrong"} if wrong_key else {}
    with running(FakeBackend("hi", "there"), api_key="secret" if wrong_key else "") as gateway:
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
                bodies = [each["value"] for each in content.get("examples", {}).values()]
                bodies += [{"req_id": "1"}, {"prompt": "hi"}, {"tokens": [72]}, {"topp": 2, "text": "x"}]
                for body in bodies if method == "post" else [None]:
                    status, head, payload = gateway.send(method.upper(), re.sub(r"\{\w+\}", "x", path), body, headers)
                    reported = operation["responses"][str(status)].get("content", {})
                    if not reported:
                        assert payload == b""
                        continue
                    kind = head.get_content_type()
                    assert kind in reported
                    if kind == "application/json":
                        is_valid(document, reported[kind]["schema"], json.loads(payload))


def test_the_examples_are_requests_of_their_schemas(document):
    for path in (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        references = {each["$ref"].rpartition("/")[2] for each in content["schema"]["anyOf"]}
        for protocol, example in content["examples"].items():
            [name] = [name for name in references if name.startswith(protocol)]
            is_valid(document, document["components"]["schemas"][name], example["value"])


@pytest.mark.slow
def test_it_is_an_openapi_document(document):
    from schemathesis.openapi import from_dict

    assert document["openapi"].startswith("3.1.")
    assert document["info"]["version"] == __version__
    operations = [result.ok() for result in from_dict(document).get_all_operations()]
    assert len(operations) == sum(map(len, document["paths"].values()))


class Page(HTMLParser):
    """Keeps what a browser would fetch or run, and what is open."""

    def __init__(self):
        super().__init__()
        self.fetched, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href") or name.startswith("on")]
        assert tag not in ("script", "link", "img", "iframe")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_shows_every_path_and_field_and_fetches_nothing_from_elsewhere(document):
    with running(FakeBackend()) as gateway:
        status, headers, payload = gateway.send("GET", "/docs")
    assert (status, headers.get_content_type()) == (200, "text/html")
    text, page = payload.decode(), Page()
    page.feed(text)
    assert (page.fetched, page.open) == (["openapi.json"], [])
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    names = {*document["paths"], *wire.FIELDS, *FORWARDED_FIELDS, *PROMPT_OUTPUT_FIELDS}
    assert [name for name in names if f"{name}</code>" not in text] == []
    assert text.index(f"<h2><code>POST {CHAT}</code>") == text.index("<h2>")


def test_its_first_sentence_says_what_becomes_of_fields_that_it_does_not_name(document):
    about = document["info"]["description"]
    assert about.startswith("A field that is not named here is refused if")
    with running(FakeBackend("hi", "there")) as gateway:
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        assert gateway.refused(CHAT, {**chat, "temprature": 1})[0] == 400  # looks like a misspelling
        assert gateway.refused(CHAT, {**chat, "max_output_tokens": 1})[0] == 400  # of another API
        assert gateway.post(CHAT, {**chat, "colour": "red", "temperature": None})["choices"]


@pytest.mark.parametrize("path", ["/openapi.json", "/docs", "/version"])
def test_a_client_without_the_key_may_read_it_and_learns_nothing_of_the_model(path):
    with running(FakeBackend(), api_key="secret", served_model_name="hidden") as gateway:
        status, _, payload = gateway.send("GET", path)
        assert status == 200
        assert b"hidden" not in payload and b"secret" not in payload
        assert gateway.send("POST", "/tokenize", {"prompt": "x"})[0] == 401


def test_the_version_is_reported():
    with running(FakeBackend()) as gateway:
        _, _, payload = gateway.send("GET", "/version")
    assert json.loads(payload) == {"version": __version__}


def test_an_error_of_the_model_about_tokens_has_openais_shape():
    class Refusing(FakeBackend):
        async def tokenize_or_detokenize(self, body):
            raise self.script[0]

    for error, status in ((InvalidRequest("wrong", field="prompt"), 400), (Overloaded("full"), 429)):
        with running(Refusing(error)) as gateway:
            code, body = gateway.refused("/tokenize", {"prompt": "x"})
        assert (code, set(body), body["error"]["code"]) == (status, {"error"}, error.kind)


def test_tokens_are_asked_of_the_model_and_answered_in_vllms_words():
    backend = FakeBackend()
    with running(backend) as gateway:
        assert gateway.post("/tokenize", {"prompt": "hi"}) == {
            **{"count": 2, "max_model_len": 8192},
            **{"tokens": [104, 105], "token_strs": None},
        }
        assert gateway.post("/detokenize", {"tokens": [104, 105]}) == {"prompt": "hi"}
        chat = {"messages": [{"role": "developer", "content": "x"}]}
        gateway.post("/tokenize", chat)
        assert gateway.refused("/tokenize", {**chat, "chat_template": "{{ 1 }}"})[0] == 400
    assert backend.bodies[2] == {"tokenize": {"messages": [{"role": "system", "content": "x"}]}}


NATIVE_KEYS = {"req_id", "error_msg", "error_code", "error_type", "version", "timestamp", "result"}
HEADERS = {409: "x-should-retry", 429: "Retry-After", 503: "Retry-After", 504: "x-should-retry"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_model_has_the_shape_of_the_protocol_that_asked(kind):
    error = KINDS[kind]("so it is", field="topp")
    with running(FakeBackend(error)) as gateway:
        for body, shape in (({"text": "x"}, NATIVE_KEYS), ({"prompt": "x"}, {"error"})):
            status, headers, payload = gateway.send("POST", COMPLETIONS, body)
            reported = json.loads(payload)
            assert status == error.code
            assert shape <= set(reported) and ("error" in reported) == (shape == {"error"})
            if "error" in reported:
                assert set(reported["error"]) == {"message", "type", "param", "code"}
                assert reported["error"]["param"] == "top_p"
            else:
                assert (reported["error_code"], reported["error_type"], reported["error_msg"]) == (
                    status,
                    kind,
                    "so it is",
                )
            given = {"x-should-retry", "Retry-After"} & set(headers)
            assert given == ({HEADERS[status]} if status in HEADERS else set())


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/none", None, 404),
        ("PUT", CHAT, b"{}", 405),
        ("POST", CHAT, b"{", 400),
        ("POST", CHAT, b"[1]", 400),
        ("POST", COMPLETIONS, b"x" * 200, 413),
    ],
)
def test_an_error_without_a_known_protocol_has_both_shapes(method, path, body, status):
    with running(FakeBackend(), max_body_bytes=100) as gateway:
        code, _, payload = gateway.send(method, path, body)
    reported = json.loads(payload)
    assert code == status
    assert {*NATIVE_KEYS, "error"} <= set(reported)
    assert (reported["error_code"], reported["error_msg"]) == (status, reported["error"]["message"])
