"""Whatever comes to the service port gets an answer or a refusal of the documented shape, and the log no traceback."""

import json
import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine import wire
from tests.fuzz import INSIDE, any_json, bodies, deep, examples, payload_of, texts
from tests.pure.gateway_fake import FakeBackend, running

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/chat/completions/completions", "/v1/responses", "/v1/messages")
QUESTIONS = ("/v1/abort", "/tokenize", "/detokenize", "/v1/messages/count_tokens")
payloads = (
    bodies("text", "prompt", "messages", "req_id", "tools", "stream", "input", "max_tokens").map(payload_of)
    | any_json.map(payload_of)
    | st.binary()
)
# What a client may write beside a body; a line break would begin another header
lines = st.text(st.characters(min_codepoint=32, max_codepoint=255, blacklist_characters="\x7f"), max_size=30)
NAMES = ("Last-Event-ID", "X-Request-Id", "Content-Encoding", "Content-Type", "Authorization", "Accept", "Origin")
headers = st.dictionaries(st.sampled_from(NAMES), lines | st.sampled_from(("0", "1,2", "gzip", "deflate")), max_size=3)
# Where JSON may be as deep as it can be read
PLACES = [
    *("%s", '{"text":%s}', '{"text":"x","metadata":%s}', '{"text":"x","chat_template_kwargs":{"a":%s}}'),
    *('{"req_id":%s,"text":"x"}', '{"prompt":%s}', '{"messages":[{"role":"user","content":"x","y":%s}]}'),
    *('{"tools":%s,"messages":[]}', '{"tokens":%s}', '{"prompt":"x","stop":%s,"stream":true}'),
]


class CheckingBackend(FakeBackend):
    """Refuses what the model would."""

    async def generate(self, body, timeout_s):
        wire.parse_request(body)
        async for each in super().generate(body, timeout_s):
            yield each


@pytest.fixture(scope="module")
def gateway():
    with running(CheckingBackend("hi", "there")) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
def nothing_unexpected(caplog):
    yield
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def check(answer, shapes=({"error"}, {"error_msg", "error_code", "is_end"})):
    status, head, payload = answer
    assert status == 200 or 400 <= status < 500, payload
    assert [word for word in INSIDE if word.encode() in payload] == []
    if status != 200:
        assert head.get_content_type() == "application/json"
        reported = json.loads(payload)
        assert any(shape <= set(reported) for shape in shapes), reported


@pytest.mark.slow
@examples(80)
@given(path=st.sampled_from(PATHS), payload=payloads, headers=headers)
@example(
    path=PATHS[0], payload=b'{"messages":[{"content":"x"}]}', headers={"Last-Event-ID": "1", "X-Request-Id": "\xff"}
)
def test_any_body_with_any_headers(gateway, path, payload, headers):
    check(gateway.send("POST", path, payload, headers))


@pytest.mark.slow
@examples(40)
@given(path=st.sampled_from(QUESTIONS), payload=payloads, headers=headers)
def test_any_question(gateway, path, payload, headers):
    check(gateway.send("POST", path, payload, headers))


@pytest.mark.parametrize("path", [PATHS[0], PATHS[1], *QUESTIONS])
@pytest.mark.parametrize("place", PLACES)
def test_json_of_any_depth(gateway, path, place):
    for depth in (100, 900, *range(940, 1000, 3), 100_000):
        check(gateway.send("POST", path, place.encode().replace(b"%s", deep(depth))))


@examples(40)
@given(method=st.sampled_from(("GET", "POST", "PUT", "HEAD", "DELETE", "TRACE", "X")), path=texts)
def test_any_path(gateway, method, path):
    target = "/" + "".join(each for each in path if 32 < ord(each) < 127)
    status, _, payload = gateway.send(method, target)
    assert status < 500 and [word for word in INSIDE if word.encode() in payload] == []
