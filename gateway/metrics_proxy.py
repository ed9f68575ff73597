"""Proxy of Triton's own metrics page. The content is forwarded unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from aiohttp import web

from gateway import half_closed

ANSWER_WITHIN_S = 10.0


def make_metrics_app(page: Path) -> web.Application:
    """Return the application that forwards /metrics.

    `page` is the Unix socket on which tritonserver serves it, to one client at a time.
    """
    session = web.AppKey("session", aiohttp.ClientSession)

    async def connected(app: web.Application) -> AsyncIterator[None]:
        connector, patience = aiohttp.UnixConnector(str(page), limit=1), aiohttp.ClientTimeout(ANSWER_WITHIN_S)
        async with aiohttp.ClientSession(connector=connector, timeout=patience) as app[session]:
            yield

    async def show(request: web.Request) -> web.Response:
        try:
            async with request.app[session].get("http://localhost/metrics") as response:
                headers = {"Content-Type": response.headers.get("Content-Type", "text/plain")}
                return web.Response(body=await response.read(), status=response.status, headers=headers)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return web.Response(status=503, text="the model server does not answer")

    app = web.Application()
    half_closed.allow(app)
    app.cleanup_ctx.append(connected)
    app.add_routes([web.get("/metrics", show)])
    return app
