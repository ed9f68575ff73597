"""How much gRPC holds of messages that are not complete. It takes all that a message may have of every stream, and does
not say how much that is: the kernel says what each connection has received, and we know what has come of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import grpc

from engine.errors import Overloaded
from gateway.inet_diag import Peer, a_peer, watch

MESSAGE_EXTRA, RESPONSE_EXTRA = 1024, 64  # bytes that come with it: headers and frames; windows


class IncomingMessages:
    """The messages of one call."""

    def __init__(self, context: Any, connection: _ClientConnection):
        self.refusal: Overloaded | None = None
        self.is_in_use = False  # it has requests that are being answered
        self.is_waiting = False  # for a message: only then more of one is taken than a window holds
        self._context = context
        self._connection = connection
        self._leave: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def next(self, within_s: float | None = None) -> Any:
        """The next message, EOF after the last one, when there is none in time or when the call is to end."""
        if self._leave.done():
            return grpc.aio.EOF
        read = asyncio.ensure_future(self._context.read())
        read.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may end when we are gone
        self.is_waiting = True
        await asyncio.wait({read, self._leave}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        self.is_waiting = False
        if read.done() and self.refusal:  # it has come in the same moment
            self.refusal, self._leave = None, asyncio.get_running_loop().create_future()
        message = read.result() if read.done() else grpc.aio.EOF
        if message is not grpc.aio.EOF:
            self._connection.num_known += len(message) + MESSAGE_EXTRA
        return message

    def has_answered(self) -> None:
        self._connection.num_known += RESPONSE_EXTRA

    def stop(self, refusal: Overloaded | None = None) -> None:
        if not self._leave.done():
            self.refusal = refusal
            self._leave.set_result(None)


class _ClientConnection:
    def __init__(self) -> None:
        self.open: set[IncomingMessages] = set()
        self.num_known = 0  # bytes that it has received and that gRPC no longer holds
        self.num_held = 0

    def has_received(self, num_bytes: int) -> None:
        self.num_known = min(self.num_known, num_bytes) if self.open else num_bytes
        self.num_held = num_bytes - self.num_known

    def refuse(self, error: Overloaded) -> None:
        """Of those that wait for a message ends the ones without a request; if there are none, all."""
        waiting = [each for each in self.open if each.is_waiting]
        for each in [each for each in waiting if not each.is_in_use] or waiting:
            each.stop(error)


class IncompleteMessageLimiter:
    """Over all connections to `port`; beyond `max_bytes` those that have sent most are refused."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._connections: dict[Peer, _ClientConnection] = {}

    @contextlib.contextmanager
    def incoming(self, context: Any) -> Iterator[IncomingMessages]:
        connection = self._connections.setdefault(peer_of(context.peer()), _ClientConnection())
        connection.num_known += MESSAGE_EXTRA
        incoming = IncomingMessages(context, connection)
        connection.open.add(incoming)
        try:
            yield incoming
        finally:
            connection.open.discard(incoming)

    async def watch(self, port: int) -> None:
        await watch([port], self._look, lambda: bool(self._connections))

    def _look(self, received: dict[Peer, int]) -> None:
        for peer, connection in list(self._connections.items()):
            connection.has_received(received.get(peer, 0))
            if peer not in received and not connection.open:
                del self._connections[peer]
        total = sum(each.num_held for each in self._connections.values())
        for each in sorted(self._connections.values(), key=lambda each: each.num_held, reverse=True):
            if total <= self._max_bytes:
                break
            text = "requests that are not complete yet have {value} bytes, the limit is {limit}"
            each.refuse(Overloaded(text, value=total, limit=self._max_bytes))
            total -= each.num_held


def peer_of(text: str) -> Peer:
    """As gRPC names a client: `ipv4:127.0.0.1:40000`, `ipv6:%5B::1%5D:40000`."""
    host, _, port = unquote(text.partition(":")[2]).rpartition(":")
    return a_peer(host.strip("[]"), int(port))
