"""gRPC connections to tritonserver: long-lived channels with a limited number of streams each.

Messages are forwarded as bytes.

The stubs of tritonclient would run one thread per stream and buffer without a limit. Here a response is read from the
connection only when its consumer asks for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from engine.errors import Cancelled, EngineUnavailable, InvalidRequest, Overloaded, RequestError, TimedOut
from gateway.backend import RESTART_WITHIN_S, ModelLost, ModelUnreachable

log = logging.getLogger(__name__)

SERVICE = "inference.GRPCInferenceService"
STREAMS_PER_CHANNEL = 64  # below the common limit of 100 for HTTP/2, beyond which requests would queue invisibly

IDLE, CONNECTING = grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING
READY = grpc.ChannelConnectivity.READY
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # otherwise all channels would share one connection
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # the supervisor restarts Triton: reconnect quickly
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.min_reconnect_backoff_ms", 20_000),  # not a pause: the time that one attempt may take on a busy machine
    ("grpc.enable_http_proxy", 0),
    ("grpc.default_authority", "localhost"),  # otherwise the escaped path of the socket
    # No keepalive pings: the peer is on this host, so its end is noticed at once, and Triton closes connections that
    # ping more often than every five minutes.
]


@dataclass(eq=False)
class _TritonConnection:
    """One gRPC channel and its running calls."""

    channel: grpc.aio.Channel
    infer: Any  # request -> call, both as bytes
    calls: set[InferCall] = field(default_factory=set)  # the running ones


class InferCall:
    """One ModelStreamInfer call to tritonserver, which answers with a stream of responses."""

    def __init__(self, connection: _TritonConnection, request: bytes, connections: TritonConnections):
        self._call: Any = None
        self._connections = connections
        self._sending: asyncio.Future[None] | None = None
        # Checked before the call, because gRPC does not report it for calls that break before the first response.
        self._is_accepted = connection.channel.get_state(try_to_connect=True) is READY
        if self._is_accepted:
            self._call = connection.infer(request)
        else:
            self._sending = asyncio.ensure_future(self._send(connection, request))

    async def _send(self, connection: _TritonConnection, request: bytes) -> None:
        self._is_accepted = await _is_there(connection.channel)
        self._call = connection.infer(request)

    def cancel(self) -> None:
        """Cancel the call, also before it was sent."""
        if self._sending:
            self._sending.cancel()
        if self._call:
            self._call.cancel()

    async def responses(self) -> AsyncGenerator[bytes, None]:
        """Yield the responses as they are read.

        Raise ModelUnreachable or ModelLost if tritonserver is gone, another RequestError for its other errors, and
        CancelledError after `cancel`.
        """
        if self._sending:
            await self._sending
        if self._is_accepted:
            self._connections.last_seen_at = time.monotonic()
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                yield response
        except grpc.aio.AioRpcError as error:
            known = self._connections.as_request_error(error, self._is_accepted)
            if isinstance(known, ModelUnreachable):
                known.was_seen_recently = time.monotonic() - self._connections.last_seen_at < RESTART_WITHIN_S
            raise known from None


class TritonConnections:
    """Pool of gRPC channels to tritonserver at `target`, an address in gRPC's notation.

    It belongs to the event loop in which it is first used.
    """

    def __init__(self, target: str):
        self._target = target
        self._connections: list[_TritonConnection] = []
        self.is_closed = False
        self.last_seen_at = -RESTART_WITHIN_S  # monotonic time of the last accepted request

    @property
    def num_running(self) -> int:
        """Return the number of running calls on all connections."""
        return sum(len(each.calls) for each in self._connections)

    @contextlib.contextmanager
    def infer(self, request: bytes) -> Iterator[InferCall]:
        """Start a ModelStreamInfer call. The call is cancelled at exit unless it has ended."""
        connection = self._least_loaded()
        inference = InferCall(connection, request, self)
        connection.calls.add(inference)
        try:
            yield inference
        finally:
            connection.calls.discard(inference)
            inference.cancel()

    async def ask(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """Return the response of the unary method `method`, which is named with its service. Raise AioRpcError."""
        ask = self._least_loaded().channel.unary_unary(f"/{method}")
        return await ask(request, timeout=timeout_s)

    async def close(self) -> None:
        """Cancel all calls and close all channels. Later calls raise EngineUnavailable."""
        self.is_closed = True
        for connection in self._connections:
            for call in connection.calls:
                call.cancel()
        await asyncio.gather(*[connection.channel.close() for connection in self._connections])

    def _least_loaded(self) -> _TritonConnection:
        """Return the connection with the fewest running calls, or a new one if all of them are full."""
        if self.is_closed:
            raise EngineUnavailable("the gateway is stopping")
        connection = min(self._connections, key=lambda each: len(each.calls), default=None)
        if connection is None or len(connection.calls) >= STREAMS_PER_CHANNEL:
            channel = self._open()
            connection = _TritonConnection(channel, self._method(channel))
            self._connections.append(connection)
        return connection

    def _open(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._target, options=CHANNEL_OPTIONS)

    def _method(self, channel: grpc.aio.Channel) -> Callable[[bytes], Any]:
        """Return the method that sends a request on the channel and returns the call."""
        return channel.unary_stream(f"/{SERVICE}/ModelStreamInfer")

    def as_request_error(self, error: grpc.aio.AioRpcError, is_accepted: bool) -> RequestError:
        """Return the error of a call for its client. `is_accepted`: the peer was connected when the call was sent."""
        if error.code() in BROKEN:
            return (ModelLost if is_accepted else ModelUnreachable)(failure(error))
        return ERRORS.get(error.code(), RequestError)(failure(error))


async def _is_there(channel: grpc.aio.Channel) -> bool:
    """Return True if the peer accepts the connection. Wait until that is known."""
    while (state := channel.get_state(try_to_connect=True)) in (CONNECTING, IDLE):
        await channel.wait_for_state_change(state)
    return state is READY


ERRORS: dict[grpc.StatusCode, type[RequestError]] = {
    grpc.StatusCode.NOT_FOUND: ModelUnreachable,  # the model is not loaded
    grpc.StatusCode.FAILED_PRECONDITION: ModelUnreachable,
    grpc.StatusCode.ABORTED: EngineUnavailable,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOut,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
}


# gRPC itself reports a connection that breaks while a request is written as INTERNAL; tritonserver uses none of these.
BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


def failure(error: grpc.aio.AioRpcError) -> str:
    """Return the message for the client and log the details, which may contain the socket's address."""
    log.warning("tritonserver: %s: %s", error.code().name, error.details())
    return (
        "the model server does not answer"
        if error.code() in BROKEN
        else f"the model server failed: {error.code().name}"
    )
