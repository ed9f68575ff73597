"""Response headers that are common to all protocols."""

from __future__ import annotations

from aiohttp import web

from gateway.app_keys import ANTHROPIC, CONFIG
from gateway.http_responses import CONTEXT
from gateway.request_id import HEADER

REDUCED = "X-Reduced-Max-Tokens"  # the limit that was applied instead of the requested one
UNENFORCED = "X-Unenforced-Keywords"  # schema keywords that are not enforced, with their places
MAX_HEADER_LEN = 2000
CORS = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "*, Authorization, Content-Type",
    "Access-Control-Expose-Headers": f"{HEADER}, request-id, {REDUCED}, {UNENFORCED}, Retry-After, x-should-retry",
    "Access-Control-Max-Age": "86400",
}


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request id, notes on reduced limits, and CORS headers to a response before it is sent."""
    context = request.get(CONTEXT)
    if context is None:  # aiohttp refuses an unknown Expect header before the middlewares run
        return
    context.has_begun = True
    response.headers[HEADER] = context.request_id
    if context.max_tokens is not None:
        response.headers[REDUCED] = str(context.max_tokens)
    if unenforced := getattr(context.exchange, "unenforced", ()):
        response.headers[UNENFORCED] = ", ".join(unenforced)[:MAX_HEADER_LEN]
    if ANTHROPIC in context.protocols:
        response.headers["request-id"] = context.request_id  # the header that Anthropic's clients read
    if origin := request.app[CONFIG].cors_allow_origin:
        response.headers.update({**CORS, "Access-Control-Allow-Origin": origin})
