"""The gRPC port: slow readers, and how much of everything a client may have at once."""

import asyncio
import json
import socket
import time

import grpc
import pytest
from tritonclient.grpc import service_pb2

from gateway import inet_diag
from gateway.body_memory import LARGE_BYTES
from gateway.grpc_server import message_limits, server
from gateway.grpc_server import stream as stream_module
from gateway.triton_connections import SERVICE
from tests.half_requests import NEEDS_SOCK_DIAG, HalfRequests
from tests.patience import PATIENCE_S
from tests.pure.inference_fake import NEVER, WAIT, FakeTriton, a_client, a_request, answers, run, serving, text_of


@pytest.mark.slow
def test_a_slow_reader_holds_tritonserver_back_and_loses_nothing(tmp_path):
    """32 MB of answers: for the one who reads nothing some windows' worth is made at most."""

    async def scenario():
        triton = FakeTriton(*["x" * 2**15] * 1024)
        async with serving(tmp_path, triton) as (_, port), a_client(port) as stub:
            call = stub.ModelStreamInfer(iter([a_request()]))
            await call.read()
            num_before = -1
            while triton.num_sent != num_before:  # until it no longer moves
                num_before = triton.num_sent
                await asyncio.sleep(0.05)
            assert num_before < 700
            num_read = 1
            while await call.read() is not grpc.aio.EOF:
                num_read += 1
            assert num_read == 1024

    run(scenario())


def test_a_client_that_takes_nothing_for_long_is_taken_for_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_module, "CLIENT_TIMEOUT_S", 0.1)

    async def scenario():
        triton = FakeTriton(*["x" * 2**15] * 2048)
        async with serving(tmp_path, triton) as (front, port), a_client(port) as stub:
            call = stub.ModelStreamInfer(iter([a_request()]))
            await call.read()
            await triton.is_cancelled.wait()
            with pytest.raises(grpc.aio.AioRpcError, match="the client read nothing for 0.1 s"):
                while await call.read() is not grpc.aio.EOF:
                    pass

    run(scenario())


def test_a_text_that_is_too_long_is_refused_before_tritonserver(tmp_path):
    async def scenario():
        triton = FakeTriton("a")
        async with serving(tmp_path, triton, max_body_bytes=2000) as (_, port), a_client(port) as stub:
            [(_, fields, _)] = await answers(stub.ModelStreamInfer(iter([a_request("x", text="x" * 2000)])))
            assert fields["error_msg"] == "The request has 2013 bytes, at most MAX_BODY_BYTES(2000) are taken"
            assert (fields["error_code"], fields["is_end"]) == (400, 1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answers(stub.ModelStreamInfer(iter([a_request(text="x" * 10**6)])))
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await answers(stub.ModelStreamInfer(iter([a_request()]))) == [("", "a", "")]
        assert len(triton.requests) == 1

    run(scenario())


def test_large_requests_without_a_first_answer_are_limited_and_small_ones_are_not(tmp_path):
    async def scenario():
        triton = FakeTriton(WAIT, "a", NEVER)
        large = {"text": "x" * (2 * LARGE_BYTES)}
        async with serving(tmp_path, triton) as (front, port), a_client(port) as stub:
            front._shared.body_memory.max_bytes = 5 * LARGE_BYTES
            call = stub.ModelStreamInfer()
            for name in "123":
                await call.write(a_request(name, **large))
            refusal = json.loads((await call.read()).infer_response.raw_output_contents[0][4:])
            assert (refusal["error_code"], refusal["error_type"]) == (429, "overloaded")
            await call.write(a_request("small"))
            while len(triton.requests) < 3:
                await asyncio.sleep(0.005)
            assert {each.id for each in triton.requests} == {"1", "2", "small"}
            triton.go.set()
            for _ in range(3):
                await call.read()
            assert front._shared.body_memory.num_bytes == 0  # they are answered now, if not to the end
            call.cancel()

    run(scenario())


@pytest.mark.slow
@NEEDS_SOCK_DIAG
@pytest.mark.parametrize(
    "method",
    ["ModelStreamInfer", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ModelReady", "ServerLive"))],
)
def test_too_many_incomplete_messages_are_refused_and_other_clients_are_served(tmp_path, method):
    """gRPC itself would hold 16 MB here, and of any number of connections."""
    limit = 1 << 20

    def push(port):
        clients = [HalfRequests(port, f"{SERVICE}/{method}", 4, 1 << 20) for _ in range(4)]
        began = idle_since = time.monotonic()
        held = 0
        # On a busy machine it may be refused later than a second after the last byte.
        while time.monotonic() < idle_since + 1 or (held > limit and time.monotonic() < began + PATIENCE_S):
            if sum(each.push() for each in clients):
                idle_since = time.monotonic()
            held = sum(each.sent[stream] for each in clients for stream in each.left)
            time.sleep(0.005)
        for each in clients:
            each.close()
        return held

    async def scenario():
        triton = FakeTriton(WAIT, "a")
        async with serving(tmp_path, triton) as (front, port), a_client(port) as stub:
            front._limiter._max_bytes = limit
            idle, busy = stub.ModelStreamInfer(), stub.ModelStreamInfer(iter([a_request()]))
            await triton.is_waiting.wait()
            assert await asyncio.to_thread(push, port) <= limit
            triton.go.set()
            assert await answers(busy) == [("", "a", "")]
            await idle.write(a_request())
            assert text_of(await idle.read()) == "a"

    run(scenario())


def test_there_are_so_many_streams_at_once_and_one_that_ends_makes_room(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "MAX_CALLS", 2)

    async def scenario():
        async with serving(tmp_path, FakeTriton(WAIT, "a")) as (front, port), a_client(port) as stub:
            calls = [stub.ModelStreamInfer() for _ in range(2)]
            while len(front._streams) < 2:
                await asyncio.sleep(0.005)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ModelStreamInfer().read()
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            calls[0].cancel()
            while len(front._streams) > 1:
                await asyncio.sleep(0.005)
            assert (await stub.ServerLive(service_pb2.ServerLiveRequest())).live

    run(scenario())


@pytest.mark.slow
def test_a_message_that_has_come_is_not_refused_for_those_that_have_not(tmp_path):
    """It waits for its turn to be read and ends exactly once."""

    async def scenario():
        async with serving(tmp_path, FakeTriton("a")) as (front, port), a_client(port) as stub:
            async with front._shared.body_memory.reading(LARGE_BYTES + 1):
                asked = asyncio.ensure_future(answers(stub.ModelStreamInfer(iter([a_request("1", text="x" * 10**5)]))))
                while not front._shared.body_memory.num_bytes:
                    await asyncio.sleep(0.005)
                front._limiter._max_bytes = -1
                await asyncio.sleep(3 * inet_diag.CHECK_EVERY_S)
                front._limiter._max_bytes = 1 << 20
            assert await asked == [("1", "a", "")]

    run(scenario())


@NEEDS_SOCK_DIAG
def test_of_a_connection_over_its_limit_waiting_streams_are_refused_before_the_others(tmp_path):
    async def scenario():
        triton = FakeTriton("a", NEVER)
        async with serving(tmp_path, triton) as (front, port), a_client(port) as stub:
            busy, idle = stub.ModelStreamInfer(), stub.ModelStreamInfer()
            await busy.write(a_request("busy"))
            await busy.read()
            await idle.wait_for_connection()
            while len(front._streams) < 2:
                await asyncio.sleep(0.005)
            for call, name in ((idle, ""), (busy, "busy")):
                front._limiter._max_bytes = -1
                response = await call.read()
                front._limiter._max_bytes = 1 << 20
                fields = json.loads(response.infer_response.raw_output_contents[0][4:])
                assert response.infer_response.id == name
                assert (fields["error_code"], fields["error_type"], fields["is_end"]) == (429, "overloaded", 1)
            assert await idle.read() is grpc.aio.EOF
            with pytest.raises(grpc.aio.AioRpcError, match="incomplete requests hold"):
                await busy.read()

    run(scenario())


def test_without_the_kernels_word_all_is_served_and_the_log_says_it(tmp_path, monkeypatch, caplog):
    def unknown(connections, peers):
        raise PermissionError(1, "Operation not permitted")

    async def scenario():
        monkeypatch.setattr(inet_diag.Connections, "received", unknown)
        monkeypatch.setattr(inet_diag, "CHECK_EVERY_S", 0.01)
        async with serving(tmp_path, FakeTriton("a")) as (_, port), a_client(port) as stub:
            for _ in range(3):
                assert await answers(stub.ModelStreamInfer(iter([a_request()]))) == [("", "a", "")]
                await asyncio.sleep(0.05)

    run(scenario())
    assert caplog.text.count("incomplete requests are not limited") == 1


@NEEDS_SOCK_DIAG
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_the_kernel_tells_of_each_client_what_it_has_sent(host, monkeypatch):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
    except OSError as error:
        pytest.skip(f"this machine has no such address: {error}")
    with listening as server:
        to = ("127.0.0.1" if host == "::" else host, server.getsockname()[1])
        connections = inet_diag.Connections([to[1]])
        with socket.create_connection(to) as client, server.accept()[0] as taken:
            client.sendall(b"x" * 5000)
            taken.recv(5000, socket.MSG_WAITALL)
            name, port = client.getsockname()[:2]
            text = f"ipv6:%5B{name}%5D:{port}" if ":" in name else f"ipv4:{name}:{port}"
            peer = message_limits.grpc_peer(text)
            assert inet_diag.received_by(to[1])[peer] == 5000  # beside connections to this port of other addresses
            assert connections.received([peer])[peer] == 5000
            client.sendall(b"x" * 300)
            taken.recv(300, socket.MSG_WAITALL)
            with monkeypatch.context() as patch:
                patch.setattr(inet_diag, "REQUEST_DUMP", None)  # a known connection is looked up
                assert connections.received([peer]) == {peer: 5300}
        with socket.create_connection(to) as other, server.accept()[0]:
            assert peer not in connections.received([peer])  # it has ended
            new = inet_diag.a_peer(*other.getsockname()[:2])
            assert connections.received([peer, new])[new] == 0


def test_metadata_that_is_too_large_is_refused(tmp_path):
    async def scenario():
        async with serving(tmp_path, FakeTriton("a")) as (_, port), a_client(port) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answers(stub.ModelStreamInfer(iter([a_request()]), metadata=[("x", "y" * 20_000)]))
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await answers(stub.ModelStreamInfer(iter([a_request()]))) == [("", "a", "")]

    run(scenario())


def test_a_stream_has_so_many_requests_at_once_and_reads_on_when_one_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_module, "MAX_OPEN", 2)

    async def scenario():
        triton = FakeTriton(WAIT, "a")
        async with serving(tmp_path, triton) as (_, port), a_client(port) as stub:
            asked = asyncio.ensure_future(answers(stub.ModelStreamInfer(iter([a_request(name) for name in "1234"]))))
            await triton.is_waiting.wait()
            await asyncio.sleep(0.1)
            assert len(triton.requests) == 2
            triton.go.set()
            assert len(await asked) == 4

    run(scenario())
