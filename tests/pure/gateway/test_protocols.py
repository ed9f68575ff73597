"""A protocol is a class and a line: one of the test's own is served like the others, and the page about it is true."""

import dataclasses
import json
import logging
import re
from pathlib import Path

import pytest

from engine.errors import EngineUnavailable, InvalidRequest
from gateway import app
from gateway.protocol import ClientProtocol, Exchange
from tests.pure.gateway_fake import FakeBackend, running

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "adding.md").read_text()
OWN, SHARED = "/v1/telegrams", "/v1/completions"


@dataclasses.dataclass(eq=False)
class TelegramExchange:
    """Answers in capitals, STOP after each token."""

    requests: list
    names: dict
    stream: bool
    timeout_s: float | None = None
    answer_id: str = "t"
    text: str = ""
    num_tokens: int = 0

    def event(self, index, answer):
        self.num_tokens = answer.usage.completion_tokens
        return answer.token.upper().encode() + b" STOP\n"

    def gather(self, index, answer):
        self.text += self.event(index, answer).decode()

    def whole(self):
        return {"telegram": self.text}


class Telegrams:
    name = "telegrams"
    paths = (OWN, SHARED)
    content_type = "text/plain"

    def fields(self, path):
        return {"telegram": {"type": "string"}}

    def needs(self, path):
        return ("telegram",)

    def example(self, path):
        return {"telegram": "hello"}

    def speaks(self, body):
        return "telegram" in body

    def parse(self, body, call):
        if not isinstance(body.get("telegram"), str):
            raise InvalidRequest("{field} is missing", field="telegram")
        request = {"text": body["telegram"], "req_id": "t"}
        return TelegramExchange([request], {"max_dec_len": "words"}, body.get("live", False))

    def error(self, error, call):
        return {"undeliverable": error.message(call.exchange.names if call.exchange else {})}

    def error_event(self, error, call):
        return json.dumps(self.error(error, call)).encode()


@pytest.fixture(autouse=True)
def protocols(monkeypatch):
    monkeypatch.setattr(app, "PROTOCOLS", (Telegrams(), *app.PROTOCOLS))


@pytest.mark.parametrize("path", [OWN, SHARED])
def test_its_requests_are_answered_whole_and_streamed(path, caplog):
    backend = FakeBackend("hi", "there")
    with caplog.at_level(logging.INFO), running(backend) as gateway:
        assert gateway.post(path, {"telegram": "hello"}) == {"telegram": "HI STOP\nTHERE STOP\n STOP\n"}
        chunks = gateway.stream(path, {"telegram": "hello", "live": True})
    assert chunks == [b"HI STOP\n", b"THERE STOP\n", b" STOP\n"]
    assert backend.bodies == [{"text": "hello", "req_id": "t"}] * 2
    lines = [record.getMessage() for record in caplog.records if record.name == "gateway.app"]
    assert all(" telegrams 2 tokens id=" in line for line in lines)


@pytest.mark.parametrize(
    ("script", "body", "answer"),
    [
        ([], b"{", "the request is not valid JSON: "),
        ([], {}, "telegram is missing"),
        ([InvalidRequest("{field} is {value}", field="max_dec_len", value=5)], {"telegram": "x"}, "words is 5"),
    ],
)
def test_its_refusals_are_its_own_from_the_first_byte_on(script, body, answer):
    with running(FakeBackend(*script)) as gateway:
        status, refusal = gateway.refused(OWN, body)
    assert (status, set(refusal)) == (400, {"undeliverable"})
    assert refusal["undeliverable"].startswith(answer)


def test_a_failure_after_the_first_byte_is_the_end_of_its_stream():
    with running(FakeBackend("hi", EngineUnavailable("gone"))) as gateway:
        stream = gateway.stream(OWN, {"telegram": "x", "live": True})
    assert b"".join(stream) == b'HI STOP\n{"undeliverable": "gone"}'


def test_the_others_answer_as_before_on_a_path_they_share_with_it():
    with running(FakeBackend("hi")) as gateway:
        assert gateway.post(SHARED, {"text": "x"})["result"] == "hi"
        assert gateway.post(SHARED, {"prompt": "x"})["choices"][0]["text"] == "hi"
        assert {"undeliverable", "error_msg", "error"} <= set(gateway.refused(SHARED, b"{")[1])


def test_the_page_names_what_a_protocol_needs_and_only_files_that_exist():
    for interface in (ClientProtocol, Exchange):
        members = {name for name in {**interface.__annotations__, **vars(interface)} if not name.startswith("_")}
        assert {name for name in members if f"`{name}`" not in PAGE} == set()
    paths = re.findall(r"`((?:engine|gateway|tests)/[\w./]+\w)`", PAGE)
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []
