"""Whatever comes to the model gets exactly one final response, an answer or a refusal, and the log no traceback."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.tokenizer import Tokenizer
from tests.byte_tokenizer import write_tokenizer
from tests.fuzz import INSIDE, any_json, bodies, deep, examples, payload_of
from tests.pure.service_fakes import FakeEngine, FakeSender, a_payload, a_service, an_input_processor

KNOWN = (200, 400, 404, 409, 503)
OPEN = {"text": "the open one", "req_id": "open", "infer_seed": 1}
objects = bodies("text", "req_id", "messages")
payloads = objects.map(payload_of) | objects.map(lambda body: payload_of([body])) | any_json.map(payload_of)


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    tokenizer, engine = Tokenizer.load(folder), FakeEngine()

    def ask(payload):
        sender = FakeSender()
        service.submit(payload, sender)
        return sender.final

    with a_service(an_input_processor(tokenizer, tokenizer.vocab_size, (64, 48, 32)), engine) as service:
        service.submit(a_payload(**OPEN), FakeSender())
        engine.listener_of(tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": OPEN["text"]}]), False))
        engine.reason = "the engine takes nothing"
        yield ask


@pytest.fixture(autouse=True)
def nothing_unexpected(caplog):
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def check(final):
    assert final["is_end"] == 1
    assert final.get("error_code", 200) in KNOWN, final
    assert [word for word in INSIDE if word in json.dumps(final)] == []


@pytest.mark.slow
@examples(80)
@given(payload=payloads | st.binary())
def test_any_bytes_may_be_a_request(ask, payload):
    check(ask(payload))


PLACES = [
    *("%s", '[{"req_id":"1","text":%s}]', '[{"req_id":"1","text":"x","metadata":%s}]', '[{"req_id":%s,"text":"x"}]'),
    '[{"req_id":"1","text":"x","chat_template_kwargs":{"a":%s}}]',
    '[{"req_id":"1","messages":[{"role":"user","content":"x","y":%s}]}]',
    '[{"req_id":"1","text":"x","answer_ids":%s,"resume_from":0}]',
    '[{"req_id":"open","resume_from":0,"text":"x","chat_template_kwargs":{"a":%s}}]',
    *('[{"tokenize":%s}]', '[{"detokenize":{"tokens":%s}}]', '[{"abort":%s}]', '[{"probe":%s}]'),
]


@pytest.mark.parametrize("place", PLACES)
def test_json_of_any_depth_may_be_a_request(ask, place):
    for depth in (100, 900, *range(940, 1000, 2), 100_000):
        check(ask(place.encode().replace(b"%s", deep(depth))))


def test_an_open_request_may_be_asked_for_again_at_any_depth(ask):
    """The fields that are compared are as deep as they can be parsed."""
    for depth in range(900, 1000, 2):
        fields = b'[{"req_id":"deep-%d","text":"x","resume_from":0,"chat_template_kwargs":{"a":%s}}]'
        check(ask(fields % (depth, deep(depth))))
        check(ask(fields % (depth, deep(depth))))
