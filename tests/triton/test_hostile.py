"""Nothing that a client sends ends a process, stops an answer of others, or is answered with what is inside."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
import time
import urllib.request

import pytest
from tritonclient.grpc import service_pb2

from benchmarks.storm.watch import resident_mb
from engine.wire.triton import LENGTH_BYTES, infer_request, request_of
from gateway.triton_connections import SERVICE
from tests.fuzz import INSIDE
from tests.half_requests import NEEDS_SOCK_DIAG, HalfRequests
from tests.hostile_requests import REFUSED, changed
from tests.patience import wait_until
from tests.triton.asking import wait_until_idle
from tests.triton.server_checks import a_channel, a_stub, pids, said, unbroken_server

METHODS = [method.name for method in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods]
MEGABYTES_4 = 4 << 20
RANDOM = random.Random(6)
MESSAGES = [b"", b"\x00", b"\xff" * 64, b"\x0a\x03abc", b"\x2a\x00" * 1000, *[RANDOM.randbytes(n) for n in (1, 7, 300)]]
# Texts where a request should be.
TEXTS = {
    "nothing": b"",
    "no JSON": b"\xff\xfe{",
    "a number of a megabyte": b"9" * (1 << 20),
    "a deep list": b"[" * 100_000,
    "a deep object": b'[{"text":' * 100_000,
    "a deep value": b'[{"req_id":"x","text":"x","metadata":' + b"[" * 900 + b"]" * 900 + b"}]",
    "300,000 fields": json.dumps([{f"field{n}": n for n in range(240_000)}]).encode(),
    "many that look like ours": json.dumps([{f"max_dec_le{n:x}": n for n in range(999)}]).encode(),
    "no numbers": b'[{"req_id":"x","text":"x","temperature":NaN,"topp":Infinity}]',
    "half a character": b'[{"req_id":"x","text":"\\ud800"}]',
    "a name with a null": b'[{"req_id":"\\u0000","text":"x","max_dec_len":0}]',
    "4 MB of text": b'[{"req_id":"x","text":"' + b"x" * (MEGABYTES_4 - 30) + b'"}]',
    "4 MB of numbers": b'[{"req_id":"x","input_ids":[' + b"1," * (MEGABYTES_4 // 2 - 20) + b"1]}]",
    "4 MB of turns": b'[{"req_id":"x","messages":[' + b"{}," * (MEGABYTES_4 // 3 - 20) + b"{}]}]",
    "more than may be": b" " * (MEGABYTES_4 + 1),
    "60 MB": b" " * (60 << 20),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))  # a system's usual one
    with unbroken_server(tmp_path_factory.mktemp("hostile"), {}) as running:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        yield running
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(autouse=True)
def unharmed(server):
    """Check after every test that the same processes run, and answer."""
    before = pids(server)
    yield
    with a_stub(server) as stub:
        request = infer_request({"req_id": f"after-{time.monotonic_ns()}", "text": "Hi", "max_dec_len": 2})
        *_, last = stub.ModelStreamInfer(iter([request]), timeout=120)
    payload = last.infer_response.raw_output_contents[0][LENGTH_BYTES:]
    assert json.loads(payload)[0]["is_end"] == 1
    assert pids(server) == before != []


@pytest.mark.parametrize("name", REFUSED)
def test_a_malformed_request_is_refused(server, name):
    change, text = REFUSED[name]
    with a_stub(server) as stub:
        answer = said(lambda: stub.ModelStreamInfer(iter([changed(change)]), timeout=60))
    assert text in answer.replace("\\'", "'")


@pytest.mark.parametrize("method", [f"{SERVICE}/{name}" for name in METHODS] + ["grpc.health.v1.Health/Check", "x/y"])
def test_any_method_may_get_any_bytes(server, method):
    with a_channel(server) as channel:
        for message in MESSAGES:
            said(lambda: [f"answer {channel.unary_unary(f'/{method}')(message, timeout=60)!r}"])  # noqa: B023


def test_any_bytes_may_be_an_inference_request(server):
    valid = infer_request({"req_id": "x", "text": "Hi", "max_dec_len": 1}).SerializeToString()
    with a_channel(server) as channel:
        stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        for _ in range(200):
            message = bytearray(valid)
            for _ in range(RANDOM.randint(1, 4)):
                message[RANDOM.randrange(len(message))] = RANDOM.randrange(256)
            cut = bytes(message[: RANDOM.choice((len(message), RANDOM.randrange(len(message))))])
            said(lambda: ["answers", *stream(iter([cut]), timeout=60)])  # noqa: B023


@pytest.mark.parametrize("name", TEXTS)
def test_any_text_may_be_a_request(server, name):
    with a_stub(server) as stub:
        text = said(lambda: stub.ModelStreamInfer(iter([request_of(TEXTS[name], "an id")]), timeout=120))
    assert "error_code" in text or "RESOURCE_EXHAUSTED" in text or "is_end" in text
    with socket.create_connection(("127.0.0.1", server.ports["SERVICE_HTTP_PORT"]), 120) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Length: {len(TEXTS[name])}\r\n\r\n"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has been refused by its length
            client.sendall(head.encode() + TEXTS[name])
        with contextlib.suppress(ConnectionResetError):
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
            assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200"))


def test_streams_that_are_left_half_way_hold_nothing(server):
    def requests(count):
        for n in range(count):
            yield infer_request({"req_id": f"half-{count}-{n}", "text": "Tell me a story.", "ignore_eos": True})
        time.sleep(0.2)  # and then nothing more

    with a_stub(server) as stub:
        calls = [stub.ModelStreamInfer(requests(n % 4)) for n in range(64)]
        for call in calls[::2]:
            with contextlib.suppress(StopIteration):
                next(call)
        for call in calls:
            call.cancel()
    wait_until_idle(server)


@pytest.mark.parametrize("port", ["SERVICE_GRPC_PORT", "SERVICE_HTTP_PORT", "HEALTH_HTTP_PORT", "METRICS_HTTP_PORT"])
def test_any_bytes_may_come_to_any_port(server, port):
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    sent = [b"\x00" * 100, b"\x16\x03\x01\x02\x00", preface + RANDOM.randbytes(500), b"GET / HTTP/9.9\r\n\r\n"]
    sent += [b"POST / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 5000 + b"\r\n", b"GET /" + b"x" * 100_000]
    sent += [RANDOM.randbytes(RANDOM.randrange(1, 2000)) for _ in range(30)]
    for data in sent:
        with socket.create_connection(("127.0.0.1", server.ports[port]), 60) as client:
            with contextlib.suppress(OSError):  # it may have closed the connection
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                client.settimeout(5)
                answer = client.recv(1 << 16)
                assert [word for word in INSIDE if word.encode() in answer] == []


def test_a_thousand_connections_to_each_port_block_no_client_and_end_no_process(server):
    """Connections to the metrics port once made the supervisor end tritonserver, which may have 1,024 open files."""
    with contextlib.ExitStack() as stack:
        for port in server.ports.values():
            for _ in range(1100):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
        for _ in range(3):  # for longer than the supervisor waits
            for url in (server.metrics_url, f"{server.health_url}/v2/health/ready", f"{server.http_url}/health"):
                with urllib.request.urlopen(url, timeout=60) as response:
                    assert response.status == 200
            time.sleep(2)


@NEEDS_SOCK_DIAG
def test_messages_that_are_never_ended_take_little_memory_and_leave_it(server):
    """The gateway once held all of 2 GB and kept a large part of it."""
    gateway, port, peak_mb = server.pid_of("gateway-0"), server.ports["SERVICE_GRPC_PORT"], 0.0
    clients = [HalfRequests(port, f"{SERVICE}/ModelStreamInfer", 64, MEGABYTES_4) for _ in range(8)]
    moved_at = time.monotonic()
    while time.monotonic() < moved_at + 1:
        if sum(each.push() for each in clients):
            moved_at = time.monotonic()
        peak_mb = max(peak_mb, resident_mb(gateway))
    for each in clients:
        each.close()
    assert peak_mb < 1000
    wait_until(lambda: resident_mb(gateway) <= 160, lambda: f"{resident_mb(gateway)} MB")
