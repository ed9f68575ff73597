"""The model behind Triton's gRPC: one stream a request on a few long-lived connections. Knows no HTTP.

The stubs of tritonclient are used without its client class: that one runs a thread a stream and buffers without a
limit. Here a response is read from the connection only when the one who asked for it wants it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from engine import wire
from engine.address import in_url
from engine.errors import (
    Cancelled,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    RequestError,
    TimedOut,
)
from engine.wire.triton import infer_request, read_response
from gateway.backend import timeout

STREAMS_PER_CHANNEL = 64  # HTTP/2 connections are commonly limited to 100 streams; beyond, requests would queue unseen
PROBE_TIMEOUT_S = 60.0  # whoever probes has a shorter one
END_TIMEOUT_S = 5.0  # for the end of the stream after the final response

CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # else all channels would share one connection
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # Triton is restarted by its supervisor: be there when it is back
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    # No keepalive pings: the peer is on this host, where a death shows at once, and Triton answers pings more frequent
    # than one in five minutes by closing the connection.
]

ERRORS: dict[grpc.StatusCode, type[RequestError]] = {
    grpc.StatusCode.UNAVAILABLE: EngineUnavailable,
    grpc.StatusCode.NOT_FOUND: EngineUnavailable,  # the model is not loaded
    grpc.StatusCode.FAILED_PRECONDITION: EngineUnavailable,
    grpc.StatusCode.ABORTED: EngineUnavailable,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOut,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
}


@dataclass(eq=False)
class _Connection:
    channel: grpc.aio.Channel
    stub: service_pb2_grpc.GRPCInferenceServiceStub
    calls: set[grpc.aio.Call] = field(default_factory=set)  # the running ones


class _Silence:
    """Cancels a call when its next response takes too long. Time in which nobody asks for it does not count.

    One timer a request, looked at when it fires: a response costs two assignments.
    """

    def __init__(self, call: grpc.aio.Call, limit_s: float):
        self._call = call
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self.was_too_long = False
        self.begins()
        self._timer = self._loop.call_later(limit_s, self._look)

    def begins(self) -> None:
        self._since: float | None = self._loop.time()

    def ends(self) -> None:
        self._since = None

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        remaining_s = self._limit_s
        if self._since is not None:
            remaining_s += self._since - self._loop.time()
        if remaining_s > 0:
            self._timer = self._loop.call_later(remaining_s, self._look)
        else:
            self.was_too_long = True
            self._call.cancel()


class TritonBackend:
    """A `gateway.backend.Backend`. Belongs to the event loop it is first used in."""

    def __init__(self, host: str, port: int):
        self._target = f"{in_url(host)}:{port}"
        self._connections: list[_Connection] = []
        self._closed = False

    def generate(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[wire.Delta, None]:
        return cast("AsyncGenerator[wire.Delta, None]", self._ask(body, timeout_s))  # a probe alone has other answers

    async def _ask(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[wire.Answer, None]:
        request = infer_request(body)
        connection = self._least_loaded()
        # gRPC writes it: a `write` of ours would wait for ever once the call is cancelled before it is connected.
        call = connection.stub.ModelStreamInfer(iter([request]))
        connection.calls.add(call)
        try:
            async with contextlib.aclosing(self._responses(call, timeout_s)) as responses:
                async for response in responses:
                    answer = read_response(response)
                    if isinstance(answer, wire.Failure):
                        await _read_to_end(responses)
                        raise answer.error
                    yield answer
                    if answer.is_end:
                        await _read_to_end(responses)
                        return
            raise EngineUnavailable("the model ended the stream without a final response")
        finally:
            connection.calls.discard(call)
            call.cancel()  # does nothing when the call has ended

    async def _responses(self, call: Any, timeout_s: float) -> AsyncGenerator[Any, None]:
        """Triton's responses to one request, gRPC's errors translated."""
        silence = _Silence(call, timeout_s)
        try:
            async for response in call:
                silence.ends()
                yield response
                silence.begins()
        except grpc.aio.AioRpcError as error:
            kind = ERRORS.get(error.code(), RequestError)
            raise kind(f"the model server failed: {error.code().name}: {error.details()}") from None
        except asyncio.CancelledError:
            if silence.was_too_long:
                text = "the model sent no response for {limit} s, the request is cancelled"
                raise TimedOut(text, limit=float(timeout_s)) from None
            if self._closed:
                raise EngineUnavailable("the gateway is stopping") from None
            raise
        finally:
            silence.close()

    async def probe(self) -> wire.ModelState:
        async with contextlib.aclosing(self._ask({wire.PROBE: True}, PROBE_TIMEOUT_S)) as answers:
            [state] = [answer async for answer in answers]
        assert isinstance(state, wire.ModelState)
        return state

    async def is_live(self) -> bool:
        try:
            response = await self._least_loaded().stub.ServerLive(service_pb2.ServerLiveRequest())
        except grpc.aio.AioRpcError:
            return False
        return response.live

    async def close(self) -> None:
        self._closed = True
        for connection in self._connections:
            for call in connection.calls:
                call.cancel()
        await asyncio.gather(*[connection.channel.close() for connection in self._connections])

    def _least_loaded(self) -> _Connection:
        """The connection with the fewest running calls, a new one when all are busy."""
        if self._closed:
            raise EngineUnavailable("the gateway is stopping")
        connection = min(self._connections, key=lambda each: len(each.calls), default=None)
        if connection is None or len(connection.calls) >= STREAMS_PER_CHANNEL:
            channel = grpc.aio.insecure_channel(self._target, options=CHANNEL_OPTIONS)
            connection = _Connection(channel, service_pb2_grpc.GRPCInferenceServiceStub(channel))
            self._connections.append(connection)
        return connection


async def _read_to_end(responses: AsyncIterator[Any]) -> None:
    """Let the stream end by itself: cancelling it now could race with its end inside Triton."""
    with contextlib.suppress(asyncio.TimeoutError, RequestError):
        async with timeout(END_TIMEOUT_S):
            async for _ in responses:
                pass
