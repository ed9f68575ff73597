"""Support for half-closed connections: HTTP allows a client to shut down its sending side and wait for the answer.

A client that has disconnected looks the same until something is written to it. So the server sends `100 Continue`,
which an HTTP/1.1 client must accept before the answer: if the client is gone the write fails, and its request is
cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import HttpVersion11, web

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PAUSES_S = (0.2, 1.0, 5.0, 20.0)  # after each `100 Continue`; some clients accept at most five
TURNS = 5  # of the event loop, in which a request that arrived together with the end of its connection is started

_unanswered: dict[asyncio.BaseTransport, web.Request] = {}
_probing: set[asyncio.Task[None]] = set()


def allow(app: web.Application) -> None:
    """Keep answering requests of `app` whose clients have shut down their sending side."""
    app.middlewares.insert(0, _track_unanswered)
    app.on_response_prepare.append(_forget)
    web.RequestHandler.eof_received = _eof_received  # type: ignore[assignment, method-assign]


@web.middleware
async def _track_unanswered(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    transport = request.transport
    if transport is None:  # the client has disconnected
        return await handler(request)
    _unanswered[transport] = request
    try:
        return await handler(request)
    finally:
        _unanswered.pop(transport, None)


async def _forget(request: web.Request, _: web.StreamResponse) -> None:
    if request.transport:
        _unanswered.pop(request.transport, None)


def _eof_received(self: web.RequestHandler) -> bool:
    """Handle the end of the client's data. Return True to keep the server's side open."""
    if self.transport is None or self.ssl_context:  # asyncio's TLS has no half-closed state
        return False
    task = asyncio.ensure_future(_probe_client(self, self.transport))
    _probing.add(task)
    task.add_done_callback(_probing.discard)
    return True


async def _probe_client(handler: web.RequestHandler, transport: asyncio.Transport) -> None:
    """Send `100 Continue` repeatedly. The second write to a client that is gone fails, which ends the connection."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
    request = _unanswered.get(transport)
    if request is None or request.version < HttpVersion11 or not request.content.is_eof():
        transport.close()  # during an answer or before the end of a request: the client has disconnected
        return
    handler.close()  # closes the connection after this answer
    for pause_s in PAUSES_S:
        if transport not in _unanswered or transport.is_closing():
            return
        transport.write(CONTINUE)
        await asyncio.sleep(pause_s)
