"""The gRPC client against a server that speaks Triton's protocol: streams, cancellation, errors, connections."""

import asyncio
import contextlib
import json
import socket

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from engine import wire
from engine.errors import (
    Cancelled,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestError,
    TimedOut,
)
from gateway import triton_connections
from gateway.backend import ModelLost, ModelUnreachable
from gateway.triton_client import TritonBackend
from gateway.triton_connections import TritonConnections

PATIENCE_S = 60  # only a test that fails waits that long
WAIT = object()  # in a script: nothing more comes
PAUSE = object()  # in a script: what follows comes a moment later


def tokens(*texts):
    fields = [{"req_id": "", "token": text, "token_ids": [], "send_idx": 0} for text in texts]
    fields = [{**each, "usage": wire.Usage(), "infer_seed": 0} for each in fields]
    final = wire.Final(**fields.pop(), finish_reason="stop", tokens_all="", tokens_all_ids=[])
    return [wire.write_answer(answer) for answer in (*[wire.Delta(**each) for each in fields], final)]


A_DELTA, _ = tokens("a", "")


def a_failure(error):
    return wire.write_answer(wire.Failure(error, "abc"))


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Sends the script as responses of the model: bytes are its output, an exception or a gRPC code ends the stream."""

    def __init__(self, *script):
        self.script = script
        self.requests = []
        self.peers = set()
        self.num_sent = 0
        self.is_waiting = asyncio.Event()
        self.is_cancelled = asyncio.Event()
        self.was_left_alone = asyncio.Event()  # the stream came to its end

    async def ModelStreamInfer(self, request_iterator, context):  # noqa: N802
        self.peers.add(context.peer())
        async for request in request_iterator:
            self.requests.append(request)
        try:
            for item in self.script:
                if item is WAIT:
                    self.is_waiting.set()
                    await asyncio.Event().wait()
                if item is PAUSE:
                    await asyncio.sleep(0.05)
                    continue
                if isinstance(item, grpc.StatusCode):
                    await context.abort(item, "so it goes")
                yield as_response(item)
                self.num_sent += 1
            self.was_left_alone.set()
        except (asyncio.CancelledError, GeneratorExit):
            self.is_cancelled.set()
            raise

    async def ServerLive(self, request, context):  # noqa: N802
        return service_pb2.ServerLiveResponse(live=True)


def as_response(item):
    response = service_pb2.ModelStreamInferResponse()
    if isinstance(item, str):
        response.error_message = item
    else:
        response.infer_response.outputs.add(name="OUT", datatype="BYTES", shape=[1])
        response.infer_response.raw_output_contents.append(len(item).to_bytes(4, "little") + item)
    return response


async def serving(servicer, port=0):
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port


@contextlib.asynccontextmanager
async def connected(servicer):
    server, port = await serving(servicer)
    backend = TritonBackend(TritonConnections(f"127.0.0.1:{port}"))
    try:
        yield backend
    finally:
        await backend.close()
        await server.stop(None)


async def texts_of(backend, body):
    return [answer.token async for answer in backend.generate(body, PATIENCE_S)]


def test_a_request_is_one_stream_with_the_contracts_names_and_a_list_of_one_object():
    async def scenario():
        triton = FakeTriton(*tokens("Hel", "lo ✓"))
        async with connected(triton) as backend:
            assert await texts_of(backend, {"req_id": "abc", "text": "✓"}) == ["Hel", "lo ✓"]
        [request] = triton.requests
        [tensor] = request.inputs
        assert (request.model_name, tensor.name, tensor.datatype, list(tensor.shape)) == ("model", "IN", "BYTES", [1])
        [content] = request.raw_input_contents
        assert int.from_bytes(content[:4], "little") == len(content) - 4
        assert json.loads(content[4:]) == [{"req_id": "abc", "text": "✓"}]

    asyncio.run(scenario())


@pytest.mark.parametrize("last", [*tokens("a"), a_failure(Overloaded("full"))])
def test_a_finished_stream_ends_by_itself_and_is_not_cancelled(last):
    async def scenario():
        triton = FakeTriton(last, PAUSE)
        async with connected(triton) as backend:
            with contextlib.suppress(Overloaded):
                await texts_of(backend, {})
            await asyncio.wait_for(triton.was_left_alone.wait(), PATIENCE_S)
        assert not triton.is_cancelled.is_set()

    asyncio.run(scenario())


def test_closing_the_generator_cancels_the_stream():
    async def scenario():
        triton = FakeTriton(A_DELTA, WAIT)
        async with connected(triton) as backend:
            answers = backend.generate({}, PATIENCE_S)
            await anext(answers)
            await answers.aclose()
            await asyncio.wait_for(triton.is_cancelled.wait(), PATIENCE_S)

    asyncio.run(scenario())


def test_cancelling_the_task_that_waits_for_an_answer_cancels_the_stream():
    async def scenario():
        triton = FakeTriton(WAIT)
        async with connected(triton) as backend:
            task = asyncio.create_task(texts_of(backend, {}))
            await asyncio.wait_for(triton.is_waiting.wait(), PATIENCE_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(triton.is_cancelled.wait(), PATIENCE_S)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_silent_model_times_out_and_its_stream_is_cancelled():
    async def scenario():
        triton = FakeTriton(A_DELTA, WAIT)
        async with connected(triton) as backend:
            assert await backend.is_live()  # connecting takes its time
            answers = backend.generate({}, 1.5)  # long enough for the first to come, on any machine
            assert (await anext(answers)).token == "a"
            with pytest.raises(TimedOut, match=r"no response for 1.5 s"):
                await anext(answers)
            await asyncio.wait_for(triton.is_cancelled.wait(), PATIENCE_S)

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def connected_to_a_frozen_server():
    """Connect to a server whose kernel accepts connections but which never answers, so that no request can be
    written.
    """
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        backend = TritonBackend(TritonConnections(f"127.0.0.1:{frozen.getsockname()[1]}"))
        try:
            yield backend
        finally:
            await backend.close()


def test_a_request_that_cannot_be_written_times_out_too():
    async def scenario():
        async with connected_to_a_frozen_server() as backend:
            task = asyncio.create_task(anext(backend.generate({}, 0.05)))
            done, _ = await asyncio.wait([task], timeout=PATIENCE_S)  # cancelling it would end it as well
            assert done == {task}
            with pytest.raises(TimedOut, match=r"no response for 0.05 s"):
                await task

    asyncio.run(scenario())


def test_closing_the_backend_ends_a_request_that_cannot_be_written():
    async def scenario():
        async with connected_to_a_frozen_server() as backend:
            task = asyncio.create_task(texts_of(backend, {}))
            await asyncio.sleep(0.05)
            await backend.close()
            done, _ = await asyncio.wait([task], timeout=PATIENCE_S)
            assert done == {task}
            with pytest.raises(EngineUnavailable, match="stopping"):
                await task

    asyncio.run(scenario())


def test_closing_the_backend_ends_running_requests_with_a_reason():
    async def scenario():
        triton = FakeTriton(WAIT)
        async with connected(triton) as backend:
            task = asyncio.create_task(texts_of(backend, {}))
            await asyncio.wait_for(triton.is_waiting.wait(), PATIENCE_S)
            await backend.close()
            with pytest.raises(EngineUnavailable, match="stopping"):
                await task
            with pytest.raises(EngineUnavailable, match="stopping"):
                await texts_of(backend, {})

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "error",
    [
        PromptTooLong("{value} of {field} is above {limit}", field="text", value=9, limit=8),
        Overloaded("full"),
        RequestError("oh"),
    ],
)
def test_a_failure_of_the_wire_is_raised_as_its_kind(error):
    async def scenario():
        async with connected(FakeTriton(a_failure(error))) as backend:
            with pytest.raises(type(error)) as caught:
                await texts_of(backend, {})
        assert (type(caught.value), str(caught.value)) == (type(error), str(error))
        assert caught.value.cause == error.cause

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, ModelLost),
        (grpc.StatusCode.NOT_FOUND, ModelUnreachable),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.DEADLINE_EXCEEDED, TimedOut),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.INTERNAL, ModelLost),
        (grpc.StatusCode.DATA_LOSS, RequestError),
    ],
)
@pytest.mark.parametrize("before", [[], [A_DELTA]])
def test_grpc_errors_have_a_kind_at_any_point(code, kind, before):
    async def scenario():
        async with connected(FakeTriton(*before, code)) as backend:
            with pytest.raises(
                RequestError, match=f"the model server failed: {code.name}$|the model server does not answer"
            ) as caught:
                await texts_of(backend, {})
        assert type(caught.value) is kind or (issubclass(kind, EngineUnavailable) and not before)

    asyncio.run(scenario())


def test_tritons_own_errors_mean_that_the_model_is_lost():
    async def scenario():
        async with connected(FakeTriton("Stub process 'model_0_0' is not healthy.")) as backend:
            with pytest.raises(ModelLost, match="not healthy"):
                await texts_of(backend, {})

    asyncio.run(scenario())


def test_a_stream_that_ends_without_a_final_response_is_an_error():
    async def scenario():
        async with connected(FakeTriton(A_DELTA)) as backend:
            with pytest.raises(ModelLost, match="without a final response"):
                await texts_of(backend, {})

    asyncio.run(scenario())


def test_a_closed_port_is_engine_unavailable():
    async def scenario():
        backend = TritonBackend(TritonConnections("127.0.0.1:1"))
        with pytest.raises(ModelUnreachable, match="^the model server does not answer$"):  # and no address
            await texts_of(backend, {})
        assert not await backend.is_live()
        await backend.close()

    asyncio.run(scenario())


def test_a_server_that_comes_back_is_used_again():
    async def scenario():
        triton = FakeTriton(*tokens("a"))
        server, port = await serving(triton)
        backend = TritonBackend(TritonConnections(f"127.0.0.1:{port}"))
        assert await texts_of(backend, {}) == ["a"]
        await server.stop(None)
        with pytest.raises(EngineUnavailable):
            await texts_of(backend, {})
        server, _ = await serving(triton, port)
        texts = None
        while texts is None:
            with contextlib.suppress(EngineUnavailable):  # until it has connected again
                texts = await texts_of(backend, {})
            await asyncio.sleep(0.005)
        assert texts == ["a"]
        await backend.close()
        await server.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_slow_reader_holds_the_server_back_and_loses_nothing():
    """32 MB of answers: the one who reads nothing receives a window's worth at most."""

    async def scenario():
        triton = FakeTriton(*tokens(*["x" * 2**15] * 1024))
        async with connected(triton) as backend:
            answers = backend.generate({}, PATIENCE_S)
            await anext(answers)
            num_before = -1
            while triton.num_sent != num_before:  # until it no longer moves
                num_before = triton.num_sent
                await asyncio.sleep(0.02)
            assert num_before < 512
            assert len([answer async for answer in answers]) == 1023

    asyncio.run(scenario())


def test_a_stream_that_ended_before_it_was_read_loses_nothing():
    async def scenario():
        triton = FakeTriton(*tokens(*"abcdefgh"))
        async with connected(triton) as backend:
            answers = backend.generate({}, PATIENCE_S)
            first = (await anext(answers)).token
            await asyncio.wait_for(triton.was_left_alone.wait(), PATIENCE_S)
            assert first + "".join([answer.token async for answer in answers]) == "abcdefgh"

    asyncio.run(scenario())


def test_busy_connections_are_joined_by_another(monkeypatch):
    monkeypatch.setattr(triton_connections, "STREAMS_PER_CHANNEL", 2)

    async def scenario():
        triton = FakeTriton(A_DELTA, WAIT)
        async with connected(triton) as backend:
            streams = [backend.generate({}, PATIENCE_S) for _ in range(5)]
            for stream in streams:
                await anext(stream)
            assert len(triton.peers) == 3
            for stream in streams:
                await stream.aclose()
            await anext(later := backend.generate({}, PATIENCE_S))
            await later.aclose()
            assert len(triton.peers) == 3  # and they are used again

    asyncio.run(scenario())


def test_the_probe_is_answered_through_the_model():
    async def scenario():
        reported = wire.ModelState(ready=False, reason="warming up", model_len=64)
        triton = FakeTriton(wire.write_answer(reported))
        async with connected(triton) as backend:
            state = await backend.probe()
            assert await backend.is_live()
        assert state == reported
        assert json.loads(triton.requests[0].raw_input_contents[0][4:]) == [{"probe": True}]

    asyncio.run(scenario())
