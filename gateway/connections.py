"""The way to tritonserver: long-lived connections with a limited number of streams each. Passes bytes on, reads none.

The stubs of tritonclient would run a thread a stream and buffer without a limit. Here a response is read from the
connection only when the one who asked for it wants it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from engine.errors import EngineUnavailable

log = logging.getLogger(__name__)

SERVICE = "inference.GRPCInferenceService"
STREAMS_PER_CHANNEL = 64  # HTTP/2 connections are commonly limited to 100 streams; beyond, requests would queue unseen

CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # else all channels would share one connection
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # Triton is restarted by its supervisor: be there when it is back
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 20_000),  # no pause but the time that an attempt may take on a busy machine
    ("grpc.enable_http_proxy", 0),
    ("grpc.default_authority", "localhost"),  # else the path of the socket, escaped
    # No keepalive pings: the peer is on this host, where a death shows at once, and Triton answers pings more frequent
    # than one in five minutes by closing the connection.
]


@dataclass(eq=False)
class _Connection:
    channel: grpc.aio.Channel
    infer: Any  # request -> call, both as bytes
    calls: set[Any] = field(default_factory=set)  # the running ones


class Connections:
    """Belongs to the event loop it is first used in. `target` is an address as gRPC writes it."""

    def __init__(self, target: str):
        self._target = target
        self._connections: list[_Connection] = []
        self.is_closed = False

    @contextlib.contextmanager
    def infer(self, request: bytes) -> Iterator[Any]:
        """A call whose `read` gives one response after the other; cancelled in the end, if it has not ended."""
        connection = self._least_loaded()
        call = connection.infer(request)
        connection.calls.add(call)
        try:
            yield call
        finally:
            connection.calls.discard(call)
            call.cancel()

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

    def _least_loaded(self) -> _Connection:
        """The connection with the fewest running calls, a new one when all are busy."""
        if self.is_closed:
            raise EngineUnavailable("the gateway is stopping")
        connection = min(self._connections, key=lambda each: len(each.calls), default=None)
        if connection is None or len(connection.calls) >= STREAMS_PER_CHANNEL:
            channel = grpc.aio.insecure_channel(self._target, options=CHANNEL_OPTIONS)
            connection = _Connection(channel, channel.unary_stream(f"/{SERVICE}/ModelStreamInfer"))
            self._connections.append(connection)
        return connection


def failure(error: grpc.aio.AioRpcError) -> str:
    """What a client may know of it. The rest is for the log: it may have the address of the socket."""
    log.warning("tritonserver: %s: %s", error.code().name, error.details())
    is_gone = error.code() == grpc.StatusCode.UNAVAILABLE
    return "the model server does not answer" if is_gone else f"the model server failed: {error.code().name}"
