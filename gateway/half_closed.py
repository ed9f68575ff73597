"""Clients that close their own half of a connection when they have asked: HTTP allows it, and they wait for the answer.

One that has left looks the same until something is written to it. So it is told to go on, which a client of HTTP/1.1
has to expect at any time before the answer: who has left does not take it, and its request is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import HttpVersion11, web

GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"
PAUSES_S = (0.2, 1.0, 5.0, 20.0)  # after each time that it is told; some clients take no more than five
TURNS = 5  # of the event loop, in which a request that has come with the end of its connection is begun

_unanswered: dict[asyncio.BaseTransport, web.Request] = {}
_asking: set[asyncio.Task[None]] = set()


def allow(app: web.Application) -> None:
    """Requests of `app` are answered, also those whose clients have closed their half."""
    app.middlewares.insert(0, _noted)
    app.on_response_prepare.append(_forget)
    web.RequestHandler.eof_received = _eof_received  # type: ignore[assignment, method-assign]


@web.middleware
async def _noted(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    transport = request.transport
    if transport is None:  # it has left
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
    """True keeps our half open."""
    if self.transport is None or self.ssl_context:  # asyncio's TLS has no half
        return False
    task = asyncio.ensure_future(_see_whether_it_is_there(self, self.transport))
    _asking.add(task)
    task.add_done_callback(_asking.discard)
    return True


async def _see_whether_it_is_there(handler: web.RequestHandler, transport: asyncio.Transport) -> None:
    """A second write to one that has left fails, and that ends the connection."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
    request = _unanswered.get(transport)
    if request is None or request.version < HttpVersion11 or not request.content.is_eof():
        transport.close()  # within an answer, or before all of a request: it has left
        return
    handler.close()  # after this answer
    for pause_s in PAUSES_S:
        if transport not in _unanswered or transport.is_closing():
            return
        transport.write(GO_ON)
        await asyncio.sleep(pause_s)
