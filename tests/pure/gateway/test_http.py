"""Tests of the mistakes of HTTP clients, of requests of browsers, and of secrets that must not be logged."""

import contextlib
import gzip
import http.client
import importlib
import inspect
import json
import logging
import re
import socket
import subprocess
import sys
import time
import typing
import zlib
from pathlib import Path

import pytest

from engine.errors import EngineUnavailable
from gateway import body as gateway_body
from tests.pure.gateway_fake import FakeBackend, running

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
POSTS = [CHAT, COMPLETIONS, CHAT + "/completions", CHAT + "/chat/completions"]
NATIVE = {"text": "hi"}


@pytest.fixture(scope="module")
def gateway():
    with running(FakeBackend("a"), max_body_bytes=250_000) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the request has no body, it must have a JSON object"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{", "not valid JSON"),
        (b'{"text": "\xff"}', "not valid JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"seed": 1' + b"0" * 5000 + b"}", "not valid JSON"),
        (b"[]", "must be a JSON object, it is a list"),
        (b'[{"text": "hi"}]', "must be a JSON object, it is a list"),
        (b"null", "must be a JSON object, it is null"),
        (b'"text"', "must be a JSON object, it is a string"),
        (b"{}", "is missing"),
    ],
)
@pytest.mark.parametrize("path", POSTS)
def test_an_unreadable_body_is_a_clear_400(gateway, path, body, message):
    status, answer = gateway.refused(path, body)
    assert status == 400
    assert message in answer.get("error", {}).get("message", answer.get("error_msg", ""))


def test_a_body_that_is_nested_almost_too_deeply_is_read(gateway):
    body = {"messages": [{"content": json.loads(b"[" * 900 + b"]" * 900)}]}
    status, answer = gateway.refused(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, "messages")


def test_bytes_that_are_not_http_leave_one_line_in_the_log_without_them(caplog):
    with running(FakeBackend()) as gateway, socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\ns3cret\x00: 1\r\n\r\n")
        assert client.recv(2**16).startswith(b"HTTP/1.0 400 ")
    assert "Error handling request from 127.0.0.1" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_body_that_no_protocol_could_be_read_from_is_answered_in_both(gateway):
    _, answer = gateway.refused(CHAT, b"{")
    assert answer["error"]["message"] == answer["error_msg"]
    assert (answer["error_code"], answer["result"], answer["error"]["code"]) == (400, "", "invalid_request")


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "nonsense", "text/x;charset=q"]
)
def test_any_content_type_will_do(gateway, content_type):
    status, _, payload = gateway.send("POST", CHAT, NATIVE, {"Content-Type": content_type})
    assert (status, json.loads(payload)["result"]) == (200, "a")


def test_a_huge_body_is_refused_by_its_length_before_it_is_sent(gateway):
    with contextlib.closing(gateway.connect()) as connection:
        connection.putrequest("POST", CHAT)
        connection.putheader("Content-Length", str(10**12))
        connection.endheaders()
        response = connection.getresponse()
        assert response.status == 413
        assert "limit of 250000 bytes" in json.loads(response.read())["error_msg"]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "dialects"), [(CHAT, {"error", "error_msg"}), (CHAT + "/completions", {"error"})])
@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 100\r\n\r\n{",
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        [b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", b"no length\r\n"],
    ],
    ids=["length", "chunked", "malformed"],
)
def test_a_body_that_does_not_end_is_refused_and_its_connection_closed(monkeypatch, path, dialects, body):
    monkeypatch.setattr(gateway_body, "BODY_TIMEOUT_S", 0.3)
    with running(FakeBackend("a")) as gateway, contextlib.closing(gateway.connect()) as connection:
        connection.connect()
        first, *later = body if isinstance(body, list) else [body]
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n" % path.encode()
        connection.sock.sendall(head + first)
        assert connection.sock.recv(1, socket.MSG_PEEK)  # 100 Continue has arrived
        for packet in later:  # read apart from the head, with which it would fail at once
            connection.sock.sendall(packet)
        response = http.client.HTTPResponse(connection.sock, method="POST")
        response.begin()
        answer = json.loads(response.read())
    assert (response.status, response.headers["Connection"]) == (408, "close")
    assert "the request body was not complete within 0.3 s" in answer["error"]["message"]
    assert {"error", "error_msg"} & set(answer) == dialects


@pytest.mark.parametrize("path", [CHAT, "/nosuch"])
def test_an_unknown_expectation_is_refused(gateway, path):
    status, _, text = gateway.send("POST", path, b"{}", {"Expect": "a-miracle"})
    assert (status, text) == (417, b"Unknown Expect: a-miracle")


@pytest.mark.parametrize("encoding", ["chunked", "gzip"])
def test_a_huge_body_without_an_honest_length_is_refused_too(gateway, encoding):
    body, headers = iter([b" " * 200_000] * 2), {}
    if encoding == "gzip":
        body, headers = gzip.compress(b" " * 10**6), {"Content-Encoding": "gzip"}
    with contextlib.closing(gateway.connect()) as connection:
        connection.request("POST", CHAT, body, headers, encode_chunked=encoding == "chunked")
        assert connection.getresponse().status == 413


def test_the_limit_of_a_body_is_that_of_its_path(gateway):
    for path, limit in ((CHAT, r"\d+ bytes \(MAX_BODY_BYTES\)"), ("/v1/abort", "8192 bytes")):
        status, _, payload = gateway.send("POST", path, b" " * 10**6)
        message = json.loads(payload)["error_msg"]
        assert (status, bool(re.fullmatch(f"the request body is larger than the limit of {limit}", message))) == (
            413,
            True,
        )


def test_a_body_that_unpacks_to_gigabytes_is_not_unpacked():
    packer = zlib.compressobj(wbits=31)
    begin = packer.compress(b"") + packer.flush(zlib.Z_FULL_FLUSH)
    megabyte = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    bomb = begin + 2000 * megabyte
    with running(FakeBackend("a"), max_body_bytes=len(bomb)) as gateway:
        used_s = -time.process_time()
        assert gateway.send("POST", CHAT, bomb, {"Content-Encoding": "gzip"})[0] == 413
        gateway.post(CHAT, NATIVE)
        used_s += time.process_time()
    assert used_s < 1.5  # unpacking takes several


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "GZIP", "identity"])
def test_a_body_may_be_compressed(gateway, encoding):
    body = json.dumps(NATIVE).encode()
    packed = {"gzip": gzip.compress, "deflate": zlib.compress}.get(encoding.lower(), bytes)(body)
    status, _, payload = gateway.send("POST", CHAT, packed, {"Content-Encoding": encoding})
    assert (status, json.loads(payload)["result"]) == (200, "a")


def test_a_packed_body_may_have_several_members(gateway):
    body = json.dumps(NATIVE).encode()
    packed = b"".join(gzip.compress(body[at : at + 1]) for at in range(len(body)))
    status, _, payload = gateway.send("POST", CHAT, packed, {"Content-Encoding": "gzip"})
    assert (status, json.loads(payload)["result"]) == (200, "a")


def test_a_body_may_be_deflated_without_a_head(gateway):
    packer = zlib.compressobj(wbits=-15)
    packed = packer.compress(json.dumps(NATIVE).encode()) + packer.flush()
    assert gateway.send("POST", CHAT, packed, {"Content-Encoding": "deflate"})[0] == 200


@pytest.mark.parametrize(
    ("encoding", "body", "message"),
    [
        ("gzip", b"{}", "not valid gzip"),
        ("gzip", gzip.compress(b'{"text": "hi"}', mtime=0)[:-9], "its end is missing"),
        ("gzip", gzip.compress(b'{"text": "hi"}', mtime=0) + b"garbage", "not valid gzip"),
        ("gzip", gzip.compress(b'{"text": "hi"}', mtime=0) + gzip.compress(b" ", mtime=0)[:-1], "its end is missing"),
        ("deflate", b"{}", "not valid deflate"),
        ("deflate", zlib.compress(b'{"text": "hi"}') * 2, "not valid deflate"),
        ("deflate", b"", "its end is missing"),
        ("br", b"{}", 'the Content-Encoding "br" of the request is not supported, gzip and deflate are'),
    ],
)
def test_a_body_that_is_packed_wrongly_is_a_clear_400_and_no_trouble_of_ours(gateway, caplog, encoding, body, message):
    status, _, payload = gateway.send("POST", CHAT, body, {"Content-Encoding": encoding})
    assert status == 400
    assert message in json.loads(payload)["error_msg"]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", CHAT, 405, "does not take GET, it takes POST"),
        ("DELETE", COMPLETIONS, 405, "does not take DELETE, it takes POST"),
        ("POST", "/v1/models", 405, "it takes GET, HEAD"),
        ("GET", "/nowhere", 404, "no such path"),
        ("POST", "/v1/chat/completions/", 404, "no such path, did you mean /v1/chat/completions?"),
        ("POST", "/chat/completions", 404, "no such path, did you mean /v1/chat/completions?"),
        ("POST", "/" + "v1/chat/completions/" * 6, 404, "no such path, see GET /"),
        ("POST", "/%ff%00/../x", 404, "no such path"),
        ("POST", "/v1/sleep/", 404, "/v1/sleep of FastDeploy is not served: `stop_server` frees the memory"),
        ("POST", "/v1/update_weights", 404, "`start_server --reload MODEL` replaces the model"),
        ("GET", "/v1/files/file-abc/content", 404, "/v1/files of OpenAI is not served: the command `run_batch`"),
        ("POST", "/v1", 404, "/v1 of PaddleNLP server is not served: the paths are below it"),
        ("POST", "/v1/nowhere", 404, "no such path, see GET /"),
        ("GET", "/v1/models/gpt", 404, "the served model is `default`"),
    ],
)
def test_errors_of_wrong_paths_and_methods_are_json(gateway, method, path, status, message):
    got, headers, payload = gateway.send(method, path)
    answer = json.loads(payload)
    assert got == status
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert ("Allow" in headers) == (status == 405)


def test_a_browser_may_ask_from_anywhere(gateway):
    asked = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
    status, headers, _ = gateway.send("OPTIONS", CHAT, headers=asked)
    assert (status, headers["Access-Control-Allow-Origin"]) == (204, "*")
    assert "Authorization" in headers["Access-Control-Allow-Headers"]
    assert {"GET", "POST", "DELETE"} <= set(headers["Access-Control-Allow-Methods"].split(", "))
    exposed = set(headers["Access-Control-Expose-Headers"].split(", "))
    assert {"X-Request-Id", "request-id", "Retry-After", "x-should-retry"} <= exposed  # what clients' retries read
    for body in (NATIVE, {**NATIVE, "stream": True}, b"{"):
        _, headers, _ = gateway.send("POST", CHAT, body)
        assert headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize("origin", ["", "http://chat"])
def test_a_setting_has_the_origins_whose_pages_may_send_requests(origin):
    with running(FakeBackend("a"), cors_allow_origin=origin) as gateway:
        for method, body in (("OPTIONS", None), ("POST", NATIVE), ("POST", {**NATIVE, "stream": True}), ("POST", b"{")):
            _, headers, _ = gateway.send(method, CHAT, body)
            assert headers.get("Access-Control-Allow-Origin", "") == origin
            assert any(name.startswith("Access-Control-") for name in headers) == bool(origin)


def test_the_root_lists_the_endpoints(gateway):
    status, _, payload = gateway.send("GET", "/")
    assert status == 200
    assert {*POSTS, "/v1/models", "/health"} <= set(json.loads(payload)["endpoints"])


def test_the_log_has_a_line_a_request_and_no_word_of_the_clients(caplog):
    secret = "s3cret\n"
    with caplog.at_level(logging.DEBUG), running(FakeBackend("a", "b")) as gateway:
        gateway.send("POST", CHAT, {"text": secret, "req_id": secret, "stream": True})
        gateway.send("POST", CHAT, {"messages": secret, "model": secret})
        gateway.send("PATCH", "/s3cret")
    lines = [record.getMessage() for record in caplog.records if record.name == "gateway.app"]
    assert [line.split()[:3] for line in lines] == [["POST", CHAT, "200"], ["POST", CHAT, "400"], ["OTHER", "-", "404"]]
    assert " native 2 tokens id=" in lines[0]
    assert "s3cret" not in caplog.text.lower()


@pytest.mark.parametrize("body", [NATIVE, {"messages": [{"role": "user", "content": "hi"}]}])
@pytest.mark.parametrize("stream", [True, False])
def test_the_log_tells_how_many_tokens_were_generated(caplog, body, stream):
    with caplog.at_level(logging.INFO), running(FakeBackend("a", "b", "c")) as gateway:
        gateway.send("POST", CHAT, {**body, "stream": stream})
    [line] = [record.getMessage() for record in caplog.records if record.name == "gateway.app"]
    assert " 3 tokens id=" in line


def test_the_log_tells_how_a_stream_that_began_well_has_ended(caplog):
    with caplog.at_level(logging.INFO), running(FakeBackend("a", EngineUnavailable("gone"))) as gateway:
        gateway.stream(CHAT, {**NATIVE, "stream": True})
    [line] = [record.getMessage() for record in caplog.records if record.name == "gateway.app"]
    assert line.split()[:3] == ["POST", CHAT, "503"]


def test_one_connection_serves_one_request_after_the_other(gateway):
    with contextlib.closing(gateway.connect()) as connection:
        for body in (NATIVE, {**NATIVE, "stream": True}, {"text": "hi", "stream": 5}, NATIVE):
            connection.request("POST", CHAT, json.dumps(body))
            assert connection.getresponse().read()
            sock = connection.sock
        assert sock is connection.sock is not None


GATEWAY = Path(__file__).parents[3] / "gateway"
MODULES = [".".join(path.relative_to(GATEWAY.parent).with_suffix("").parts) for path in GATEWAY.rglob("*.py")]


@pytest.mark.parametrize("module", [name for name in MODULES if not name.endswith("__main__")])
def test_annotations_name_what_there_is(module):
    module = importlib.import_module(module.removesuffix(".__init__"))
    for each in vars(module).values():
        if getattr(each, "__module__", "") == module.__name__ and (inspect.isfunction(each) or inspect.isclass(each)):
            typing.get_type_hints(each)


@pytest.mark.parametrize("module", ["native", "openai", "protocol"])
def test_a_protocol_needs_no_http(module):
    script = f"import sys, gateway.{module}; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=GATEWAY.parent).returncode == 0


OF_ENGINE = (("engine", " import wire"), ("engine", " import __version__"))


def test_the_gateway_knows_of_the_engine_its_contract_its_settings_and_its_errors_only():
    sources = [path.read_text() for path in GATEWAY.rglob("*.py")]
    imports = {found for source in sources for found in re.findall(r"(?:from|import) (engine[\w.]*)(.*)", source)}
    theirs = {module for module, names in imports if (module, names) not in OF_ENGINE}
    assert theirs <= {
        f"engine.{name}"
        for name in (
            *(
                "address",
                "errors",
                "garbage",
                "log",
                "placement",
                "sampling_parameters",
                "settings.config",
                "settings.disaggregation",
                "settings.foreign.endpoints",
                "settings.keys",
                "settings.served",
                "settings.tls",
                "tracing",
                "wire",
                "wire.triton",
            ),
        )
    }
