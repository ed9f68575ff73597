"""The headers that responses have, whatever their protocol."""

from __future__ import annotations

from aiohttp import web

from gateway.answers import CALL
from gateway.parts import ANTHROPIC, CONFIG
from gateway.request_id import HEADER

REDUCED = "X-Reduced-Max-Tokens"  # the longest answer that there was room for
UNENFORCED = "X-Unenforced-Keywords"  # of a schema, where its client allows that: each with its place
MAX_HEADER_LEN = 2000
CORS = {
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "*, Authorization, Content-Type",
    "Access-Control-Expose-Headers": f"{HEADER}, {REDUCED}, {UNENFORCED}",
    "Access-Control-Max-Age": "86400",
}


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    call = request[CALL]
    call.has_begun = True
    response.headers[HEADER] = call.request_id
    if call.max_tokens is not None:
        response.headers[REDUCED] = str(call.max_tokens)
    if unenforced := getattr(call.exchange, "unenforced", ()):
        response.headers[UNENFORCED] = ", ".join(unenforced)[:MAX_HEADER_LEN]
    if ANTHROPIC in call.protocols:
        response.headers["request-id"] = call.request_id  # the one that its clients read
    if origin := request.app[CONFIG].cors_allow_origin:
        response.headers.update({**CORS, "Access-Control-Allow-Origin": origin})
