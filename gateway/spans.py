"""Trace span of an HTTP request, which is the parent of the model's spans.

It is active if OTEL_EXPORTER_OTLP_ENDPOINT is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from aiohttp import web

from engine.settings.config import Config
from engine.tracing import SERVER, Context, Span, Tracer
from gateway.protocol import RequestContext

TRACER = web.AppKey("tracer", Tracer)


def begin_tracing(app: web.Application, config: Config) -> None:
    """Set up the tracer of the application, if tracing is configured."""
    if tracer := Tracer.of(config, "gateway"):
        app[TRACER] = tracer
        app.on_cleanup.append(_close)


@contextlib.contextmanager
def traced(request: web.Request, context: RequestContext) -> Iterator[dict[str, int]]:
    """Record the span of a request. The caller sets `status` in the yielded dict."""
    ended = {"status": 0}
    if (tracer := request.app.get(TRACER)) is None or request.method != "POST":
        yield ended
        return
    parent, start = Context.read(request.headers.get("traceparent")), time.time()
    own = parent.child()
    context.traceparent = own.traceparent
    try:
        yield ended
    finally:
        resource, status = request.match_info.route.resource, ended["status"]
        if own.is_sampled and resource:  # else the path is a client's own words
            about = {
                "http.request.method": "POST",
                "http.route": resource.canonical,
                "http.response.status_code": status,
            }
            error = str(status) if status >= 500 else ""
            name = f"POST {resource.canonical}"
            tracer.send([Span(name, own, parent.span_id, start, time.time(), about, SERVER, error)])


async def _close(app: web.Application) -> None:
    await asyncio.get_running_loop().run_in_executor(None, app[TRACER].close)
