"""The way to tritonserver: long-lived connections with a limited number of streams each. Passes bytes on, reads none.

The stubs of tritonclient would run a thread a stream and buffer without a limit. Here a response is read from the
connection only when the one who asked for it wants it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from engine.errors import Cancelled, EngineUnavailable, InvalidRequest, Overloaded, RequestError, TimedOut
from gateway.backend import COMING_BACK_S, ModelLost, ModelUnreachable

log = logging.getLogger(__name__)

SERVICE = "inference.GRPCInferenceService"
STREAMS_PER_CHANNEL = 64  # HTTP/2 connections are commonly limited to 100 streams; beyond, requests would queue unseen

IDLE, CONNECTING = grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # else all channels would share one connection
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # Triton is restarted by its supervisor: be there when it is back
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.min_reconnect_backoff_ms", 20_000),  # no pause but the time that an attempt may take on a busy machine
    ("grpc.enable_http_proxy", 0),
    ("grpc.default_authority", "localhost"),  # else the path of the socket, escaped
    # No keepalive pings: the peer is on this host, where a death shows at once, and Triton answers pings more frequent
    # than one in five minutes by closing the connection.
]


@dataclass(eq=False)
class _TritonConnection:
    channel: grpc.aio.Channel
    infer: Any  # request -> call, both as bytes
    calls: set[InferCall] = field(default_factory=set)  # the running ones


class InferCall:
    """A request that tritonserver answers with a stream."""

    def __init__(self, connection: _TritonConnection, request: bytes, way: TritonConnections):
        self._call: Any = None
        self._is_taken = False
        self._way = way
        self._asking = asyncio.ensure_future(self._ask(connection, request))

    async def _ask(self, connection: _TritonConnection, request: bytes) -> None:
        # Known before it is asked, as gRPC does not tell it of what breaks off before there is a response.
        self._is_taken = await _is_there(connection.channel)
        self._call = connection.infer(request)

    def cancel(self) -> None:
        self._asking.cancel()
        if self._call:
            self._call.cancel()

    async def responses(self) -> AsyncGenerator[bytes, None]:
        """As they are read. Raises ModelUnreachable and ModelLost when there is no tritonserver (any more), another
        RequestError for its other errors, CancelledError after a `cancel`."""
        await self._asking
        if self._is_taken:
            self._way.was_there_at = time.monotonic()
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                yield response
        except grpc.aio.AioRpcError as error:
            known = _known(error, self._is_taken)
            if isinstance(known, ModelUnreachable):
                known.was_there = time.monotonic() - self._way.was_there_at < COMING_BACK_S
            raise known from None


class TritonConnections:
    """Belongs to the event loop it is first used in. `target` is an address as gRPC writes it."""

    def __init__(self, target: str):
        self._target = target
        self._connections: list[_TritonConnection] = []
        self.is_closed = False
        self.was_there_at = -COMING_BACK_S  # tritonserver, when it last took a request

    @property
    def num_running(self) -> int:
        return sum(len(each.calls) for each in self._connections)

    @contextlib.contextmanager
    def infer(self, request: bytes) -> Iterator[InferCall]:
        """Cancelled in the end, if it has not ended."""
        connection = self._least_loaded()
        inference = InferCall(connection, request, self)
        connection.calls.add(inference)
        try:
            yield inference
        finally:
            connection.calls.discard(inference)
            inference.cancel()

    async def ask(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """The answer of a method that has one; `method` with its service. Raises AioRpcError."""
        ask = self._least_loaded().channel.unary_unary(f"/{method}")
        return await ask(request, timeout=timeout_s)

    async def close(self) -> None:
        self.is_closed = True
        for connection in self._connections:
            for call in connection.calls:
                call.cancel()
        await asyncio.gather(*[connection.channel.close() for connection in self._connections])

    def _least_loaded(self) -> _TritonConnection:
        """The connection with the fewest running calls, a new one when all are busy."""
        if self.is_closed:
            raise EngineUnavailable("the gateway is stopping")
        connection = min(self._connections, key=lambda each: len(each.calls), default=None)
        if connection is None or len(connection.calls) >= STREAMS_PER_CHANNEL:
            channel = grpc.aio.insecure_channel(self._target, options=CHANNEL_OPTIONS)
            connection = _TritonConnection(channel, channel.unary_stream(f"/{SERVICE}/ModelStreamInfer"))
            self._connections.append(connection)
        return connection


async def _is_there(channel: grpc.aio.Channel) -> bool:
    """Whether somebody answers at its other end, once that is known."""
    while (state := channel.get_state(try_to_connect=True)) in (CONNECTING, IDLE):
        await channel.wait_for_state_change(state)
    return state is grpc.ChannelConnectivity.READY


ERRORS: dict[grpc.StatusCode, type[RequestError]] = {
    grpc.StatusCode.NOT_FOUND: ModelUnreachable,  # the model is not loaded
    grpc.StatusCode.FAILED_PRECONDITION: ModelUnreachable,
    grpc.StatusCode.ABORTED: EngineUnavailable,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOut,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
}


# A connection that breaks while a request is written is told as INTERNAL by gRPC itself; tritonserver says neither.
BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


def _known(error: grpc.aio.AioRpcError, is_taken: bool) -> RequestError:
    if error.code() in BROKEN:
        return (ModelLost if is_taken else ModelUnreachable)(failure(error))
    return ERRORS.get(error.code(), RequestError)(failure(error))


def failure(error: grpc.aio.AioRpcError) -> str:
    """What a client may know of it. The rest is for the log: it may have the address of the socket."""
    log.warning("tritonserver: %s: %s", error.code().name, error.details())
    return (
        "the model server does not answer"
        if error.code() in BROKEN
        else f"the model server failed: {error.code().name}"
    )
