"""Limit of the memory that gRPC holds for incomplete messages.

gRPC buffers up to the largest message of every stream and does not report how much that is. The kernel reports how many
bytes each connection has received; the bytes of completed messages are subtracted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import grpc

from engine.errors import Overloaded
from gateway.inet_diag import Peer, a_peer, watch

MESSAGE_EXTRA = 1024  # bytes of headers and frames that come with a message
RESPONSE_EXTRA = 64  # bytes of window updates that come for a response


class IncomingMessages:
    """Incoming messages of one gRPC call."""

    def __init__(self, context: grpc.aio.ServicerContext, connection: _ClientConnection):
        self.refusal: Overloaded | None = None
        self.is_in_use = False  # it has running requests
        self.is_waiting = False  # for a message: only then gRPC buffers more of it than one window
        self._context = context
        self._connection = connection
        self._leave: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def next(self, within_s: float | None = None) -> Any:
        """Return the next message.

        Return EOF after the last one, after `within_s` seconds, or when the call has to end.
        """
        if self._leave.done():
            return grpc.aio.EOF
        read = asyncio.ensure_future(self._context.read())
        # The read may fail after this call has ended: retrieve its exception.
        read.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.is_waiting = True
        await asyncio.wait({read, self._leave}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        self.is_waiting = False
        if read.done() and self.refusal:  # the message arrived at the same moment
            self.refusal, self._leave = None, asyncio.get_running_loop().create_future()
        message = read.result() if read.done() else grpc.aio.EOF
        if message is not grpc.aio.EOF:
            self._connection.num_known += len(message) + MESSAGE_EXTRA
        return message

    def record_response(self) -> None:
        """Account for the bytes that the client sends back for a response."""
        self._connection.num_known += RESPONSE_EXTRA

    def stop(self, refusal: Overloaded | None = None) -> None:
        """End the call before its next message, with `refusal` as the reason."""
        if not self._leave.done():
            self.refusal = refusal
            self._leave.set_result(None)


class _ClientConnection:
    """Calls and byte counts of one connection."""

    def __init__(self) -> None:
        self.open: set[IncomingMessages] = set()
        self.num_known = 0  # received bytes that gRPC no longer holds
        self.num_held = 0

    def update_received(self, num_bytes: int) -> None:
        self.num_known = min(self.num_known, num_bytes) if self.open else num_bytes
        self.num_held = num_bytes - self.num_known

    def refuse(self, error: Overloaded) -> None:
        """End the calls that wait for a message.

        Calls without a running request are ended first; the others only if there are none.
        """
        waiting = [each for each in self.open if each.is_waiting]
        for each in [each for each in waiting if not each.is_in_use] or waiting:
            each.stop(error)


class IncompleteMessageLimiter:
    """Limits the bytes of incomplete messages over all connections.

    Beyond `max_bytes` the connections that hold the most are refused.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._connections: dict[Peer, _ClientConnection] = {}

    @contextlib.contextmanager
    def incoming(self, context: grpc.aio.ServicerContext) -> Iterator[IncomingMessages]:
        """Yield the messages of a call and account for them."""
        connection = self._connections.setdefault(grpc_peer(context.peer()), _ClientConnection())
        connection.num_known += MESSAGE_EXTRA
        incoming = IncomingMessages(context, connection)
        connection.open.add(incoming)
        try:
            yield incoming
        finally:
            connection.open.discard(incoming)

    async def watch(self, port: int) -> None:
        """Check the connections to `port` periodically, until cancelled."""
        await watch([port], self._look, lambda: self._connections)

    def _look(self, received: dict[Peer, int]) -> None:
        for peer, connection in list(self._connections.items()):
            connection.update_received(received.get(peer, 0))
            if peer not in received and not connection.open:
                del self._connections[peer]
        total = sum(each.num_held for each in self._connections.values())
        for each in sorted(self._connections.values(), key=lambda each: each.num_held, reverse=True):
            if total <= self._max_bytes:
                break
            text = "incomplete requests hold {value} bytes, the limit is {limit}; retry later"
            each.refuse(Overloaded(text, value=total, limit=self._max_bytes))
            total -= each.num_held


def grpc_peer(text: str) -> Peer:
    """Return the key of a client that gRPC names `ipv4:127.0.0.1:40000` or `ipv6:%5B::1%5D:40000`."""
    host, _, port = unquote(text.partition(":")[2]).rpartition(":")
    return a_peer(host.strip("[]"), int(port))
