"""Clients that leave, models that fall silent, and workers that are asked to stop."""

import contextlib
import http.client
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from engine.settings.config import Config
from gateway import __main__ as gateway_main
from gateway import http_responses
from gateway.__main__ import listen
from gateway.connection_limits import MAX_CONNECTIONS
from tests.pure.gateway_fake import PATIENCE_S, WAIT, FakeBackend, chunks, events, running
from tests.server import free_ports

ROOT = Path(__file__).parents[3]
CHAT = "/v1/chat/completions"
NATIVE = {"text": "hi"}
OPENAI = {"messages": [{"role": "user", "content": "hi"}], "model": "m"}


def leave(connection):
    """Close the connection as a killed client does, without shutting it down."""
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


PROMPTS = {"prompt": ["a", "b", "c"], "n": 2}


@pytest.mark.parametrize("body", [NATIVE, {**NATIVE, "n": 2}, OPENAI, PROMPTS])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [[WAIT], ["a", WAIT]])
def test_a_client_that_leaves_cancels_its_requests_at_once(body, stream, script):
    backend = FakeBackend(*script)
    with running(backend) as gateway:
        connection = gateway.connect()
        path = "/v1/completions" if body is PROMPTS else CHAT
        connection.request("POST", path, json.dumps({**body, "stream": stream}))
        num_requests = len(body.get("prompt", [1]))
        assert all(backend.waiting.acquire(timeout=PATIENCE_S) for _ in range(num_requests))
        leave(connection)
        assert all(backend.cancelled.acquire(timeout=PATIENCE_S) for _ in range(num_requests))


def test_a_client_that_has_left_before_the_first_byte_is_no_error(caplog):
    backend = FakeBackend(WAIT)
    with running(backend) as gateway:
        for _ in range(20):
            connection = gateway.connect()
            connection.request("POST", CHAT, json.dumps({**NATIVE, "stream": True}))
            assert backend.waiting.acquire(timeout=PATIENCE_S)
            backend.go()
            leave(connection)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


EXPECTING = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\n"


def test_a_client_that_leaves_before_it_may_send_its_body_is_no_error(caplog):
    with running(FakeBackend("a")) as gateway:
        for _ in range(20):
            connection = gateway.connect()
            connection.connect()
            connection.sock.sendall(EXPECTING)
            leave(connection)
        assert gateway.post(CHAT, NATIVE)["result"] == "a"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def asked_and_half_closed(gateway, body, version=b"HTTP/1.1"):
    client, payload = socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_S), json.dumps(body).encode()
    client.sendall(b"POST %b %b\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), version, len(payload)))
    client.sendall(payload)
    client.shutdown(socket.SHUT_WR)
    return client


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_its_half_of_the_connection_gets_its_answer(stream):
    """However long it takes to begin; then the connection is closed."""
    backend = FakeBackend(WAIT, "a", "b")
    with running(backend) as gateway, asked_and_half_closed(gateway, {**NATIVE, "stream": stream}) as client:
        assert backend.waiting.acquire(timeout=PATIENCE_S)
        assert client.recv(8, socket.MSG_PEEK) == b"HTTP/1.1"  # 100 Continue has arrived
        assert not backend.cancelled.acquire(timeout=0.5)
        backend.go()
        response = http.client.HTTPResponse(client, method="POST")
        response.begin()
        lines = [json.loads(line) for line in response.read().splitlines()]
        assert (response.status, lines[-1]["tokens_all"], len(lines)) == (200, "ab", 3 if stream else 1)
        assert client.recv(1) == b""


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_one_that_has_left_after_that_is_noticed_before_there_is_an_answer(version):
    backend = FakeBackend(WAIT)
    with running(backend) as gateway:
        client = asked_and_half_closed(gateway, NATIVE, version=version)
        assert backend.waiting.acquire(timeout=PATIENCE_S)
        client.close()
        assert backend.cancelled.acquire(timeout=PATIENCE_S)


def test_one_that_closes_its_half_within_a_request_or_an_answer_has_left():
    backend = FakeBackend("a", WAIT)
    with running(backend) as gateway, contextlib.closing(gateway.connect()) as connection:
        connection.request("POST", CHAT, json.dumps({**NATIVE, "stream": True}))
        assert connection.getresponse().readline()
        connection.sock.shutdown(socket.SHUT_WR)
        assert backend.cancelled.acquire(timeout=PATIENCE_S)
        with socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_S) as client:
            client.sendall(EXPECTING.replace(b"Expect: 100-continue\r\n", b"") + b"{")
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""


@pytest.mark.parametrize("begun", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A: "])
def test_a_connection_without_a_whole_request_is_closed_however_slowly_it_comes(begun, monkeypatch):
    monkeypatch.setattr(gateway_main, "SILENT_CLIENT_S", 0.2)
    with running(FakeBackend("a")) as gateway, socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(begun)
        client.settimeout(0.05)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                assert client.recv(1000) == b""
                return
            if begun:
                client.sendall(b"x")
    raise AssertionError("it is still open")


def test_a_client_that_does_not_read_is_taken_for_gone(monkeypatch):
    monkeypatch.setattr(http_responses, "SURELY_BUFFERED", 0)
    backend = FakeBackend(*["x" * 2**20] * 64)
    with running(backend, request_timeout_s=0.1) as gateway, contextlib.closing(gateway.connect()) as connection:
        connection.request("POST", CHAT, json.dumps({**NATIVE, "stream": True}))
        assert backend.cancelled.acquire(timeout=PATIENCE_S)
        with pytest.raises((ConnectionError, http.client.IncompleteRead)):
            connection.getresponse().read()


@pytest.mark.parametrize("settings", [{"request_timeout_s": 0.05}, {}])
def test_a_silent_model_is_a_504_that_says_so(settings):
    body = NATIVE if settings else {**NATIVE, "timeout": 0.05}
    with running(FakeBackend(WAIT), **settings) as gateway:
        status, answer = gateway.refused(CHAT, body)
    assert (status, answer["error_type"]) == (504, "timeout")
    assert answer["error_msg"] == "the model sent no response for 0.05 s, the request is cancelled"


def test_a_model_that_falls_silent_ends_the_stream_with_an_error():
    with running(FakeBackend("a", WAIT), request_timeout_s=0.05) as gateway:
        native = gateway.stream(CHAT, {**NATIVE, "stream": True})
        openai = events(gateway.stream(CHAT, {**OPENAI, "stream": True}))
    assert [json.loads(line)["error_code"] for line in native] == [0, 504]
    assert openai[-1]["error"]["code"] == "timeout"


def test_a_timeout_of_zero_is_the_default_one():
    with running(FakeBackend("a")) as gateway:
        assert gateway.post(CHAT, {**NATIVE, "timeout": 0})["result"] == "a"


@contextlib.contextmanager
def begun(gateway, body):
    """Return the response to a stream that has begun."""
    with contextlib.closing(gateway.connect()) as connection:
        connection.request("POST", CHAT, json.dumps({**body, "stream": True}))
        yield connection.getresponse()


def test_running_requests_finish_while_draining_and_new_ones_are_refused():
    backend = FakeBackend("a", WAIT, "b")
    with running(backend, drain_timeout_s=PATIENCE_S) as gateway, contextlib.closing(gateway.connect()) as other:
        with begun(gateway, NATIVE) as native, begun(gateway, OPENAI) as openai:
            assert all(backend.waiting.acquire(timeout=PATIENCE_S) for _ in range(2))
            other.connect()
            status = None
            while status in (None, 200):  # until it has heard
                other.request("GET", "/")
                status = (response := other.getresponse()).status
                answer = json.loads(response.read())
                gateway.stop()
            assert (status, answer["error_msg"]) == (503, "the server is stopping")
            with pytest.raises(ConnectionRefusedError):
                gateway.connect().connect()
            backend.go()
            assert [json.loads(line)["token"] for line in chunks(native)] == ["a", "b", ""]
            assert events([openai.read()])[-1] == "[DONE]"


def test_streams_that_run_longer_than_the_drain_timeout_end_with_an_error_event():
    backend = FakeBackend("a", WAIT)
    with running(backend, drain_timeout_s=0.05) as gateway, begun(gateway, OPENAI) as response:
        assert backend.waiting.acquire(timeout=PATIENCE_S)
        gateway.stop()
        last = events([response.read()])[-1]
    assert last["error"]["message"] == "the gateway is stopping"
    assert last["error"]["code"] == "engine_unavailable"


def test_a_request_that_waits_for_its_first_token_is_refused_when_the_drain_timeout_is_over():
    backend = FakeBackend(WAIT)
    with running(backend, drain_timeout_s=0.05) as gateway, contextlib.closing(gateway.connect()) as connection:
        connection.request("POST", CHAT, json.dumps(NATIVE))
        assert backend.waiting.acquire(timeout=PATIENCE_S)
        gateway.stop()
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error_code"]) == (503, 503)


def test_workers_share_a_port():
    first = listen("127.0.0.1", 0)
    second = listen("127.0.0.1", first.getsockname()[1])
    for sock in (first, second):
        sock.listen()
        sock.close()


# --- the process ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def a_process(module, *arguments, max_files=0, **settings):
    """Run a process of the gateway, with at most `max_files` open files if that is given. Return it and its port.

    It finds no tritonserver, unless `settings` say where one is.
    """
    port, grpc_port, metrics_port = free_ports(3)
    variable = "HEALTH_HTTP_PORT" if module == "gateway.health" else "SERVICE_HTTP_PORT"
    ports = {"SERVICE_GRPC_PORT": str(grpc_port), "SERVICE_HTTP_PORT": "-1", "METRICS_HTTP_PORT": str(metrics_port)}
    settings = {"SERVICE_HOST": "127.0.0.1", "RUN_DIR": "/nonexistent", **ports, **settings}
    settings |= {variable: str(port)}
    command = [sys.executable, "-m", module, *arguments]
    if max_files:
        command = ["sh", "-c", f'ulimit -Sn {max_files}; exec "$@"', "sh", *command]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, **settings})
    try:
        yield process, port
    finally:
        process.kill()
        process.communicate()


def status_line(port, path):
    """Ask until the port is open, and return the status line."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client,
        ):
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            return client.recv(2**16).split(b"\r\n")[0]
        time.sleep(0.005)
    raise TimeoutError(path)


@pytest.mark.slow
def test_a_worker_serves_until_sigterm_and_exits_with_0():
    with a_process("gateway", "--index", "3") as (process, port):
        assert f"worker 3 gateway: listening on 127.0.0.1:{port}" in process.stderr.readline()
        assert status_line(port, "/health") == b"HTTP/1.1 503 Service Unavailable"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_the_health_port_is_a_process_that_exits_with_0_on_sigterm():
    with a_process("gateway.health") as (process, port):
        assert status_line(port, "/v2/health/live") == b"HTTP/1.1 503 Service Unavailable"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


HANGS = """
import asyncio, time
from gateway import watchdog

async def watched_and_hung(watched=watchdog.end_when_hung):
    asyncio.get_running_loop().call_later(0.5, time.sleep, 60)
    await watched()

watchdog.MAX_BUSY_S, watchdog.end_when_hung = 1, watched_and_hung
"""


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("module", ["gateway", "gateway.health"])
def test_a_process_whose_loop_hangs_says_where_and_ends(module, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    with a_process(module, PYTHONPATH=f"{tmp_path}:{ROOT}") as (process, _):
        assert process.wait(PATIENCE_S) == 1
        assert "in _run_once" in process.stderr.read()


@pytest.mark.slow
def test_thousands_of_connections_of_one_client_leave_the_health_port_reachable():
    """The usual limit is 1024 open files; without a higher one health checks would fail beyond it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = MAX_CONNECTIONS + 200
    if hard < 2 * count:
        pytest.skip(f"this process may have {hard} files, it needs {2 * count}")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * count, hard))
        with a_process("gateway.health", max_files=256) as (_, port), contextlib.ExitStack() as stack:
            status_line(port, "/")
            idle = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S)) for _ in range(count)
            ]
            assert status_line(port, "/v2/health/live") == b"HTTP/1.1 503 Service Unavailable"
            deadline = time.monotonic() + PATIENCE_S
            while not all(select.select([each], [], [], 0)[0] for each in idle[:100]):  # the oldest are closed
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class AliveServicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    def ServerLive(self, request, context):  # noqa: N802
        return service_pb2.ServerLiveResponse(live=True)


@pytest.mark.slow
def test_the_health_port_is_live_once_tritonserver_and_the_ports_for_clients_are(tmp_path):
    grpc_port, http_port = free_ports(2)
    config = Config(run_dir=str(tmp_path))
    config.triton_socket.parent.mkdir()
    server = grpc.server(ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(AliveServicer(), server)
    server.add_insecure_port(config.triton_target)
    server.start()
    ports = {"SERVICE_GRPC_PORT": str(grpc_port), "SERVICE_HTTP_PORT": str(http_port), "RUN_DIR": str(tmp_path)}
    with a_process("gateway.health", **ports) as (_, port), socket.create_server(("127.0.0.1", grpc_port)):
        assert status_line(port, "/v2/health/live") == b"HTTP/1.1 503 Service Unavailable"
        with socket.create_server(("127.0.0.1", http_port)):
            deadline = time.monotonic() + PATIENCE_S
            while status_line(port, "/v2/health/live") != b"HTTP/1.1 200 OK":  # an answer may be a moment old
                assert time.monotonic() < deadline
                time.sleep(0.05)
    server.stop(None).wait()


@pytest.mark.slow
def test_a_worker_that_cannot_listen_says_why():
    with a_process("gateway", SERVICE_HOST="192.0.2.1") as (process, _):
        _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "cannot serve on 192.0.2.1" in log.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["gateway", "gateway.health"])
def test_a_wrong_setting_ends_a_process_with_one_sentence(module):
    with a_process(module, MAX_BODY_BYTES="many") as (process, _):
        _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert log == "MAX_BODY_BYTES is 'many', it must be a whole number\n"
