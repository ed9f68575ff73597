"""Web page at `/`: a chat with the model and a live view of the server.

Its files are served as they are, without a build step, and access only this server. Text of the model or of other users
is inserted as text and never as HTML (markdown.js, dom.js); the headers prevent a mistake there from running a script.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",  # images that the reader attaches to a message
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",  # text can never become HTML or a script
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "Cache-Control": "no-cache",  # cached and revalidated by ETag, so that a new server's page is used at once
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
}


class StaticFile(NamedTuple):
    """Content of one file, in memory."""

    content_type: str
    body: bytes
    etag: str


def _read(path: Path) -> StaticFile:
    body = path.read_bytes()
    return StaticFile(TYPES[path.suffix], body, hashlib.sha256(body).hexdigest()[:16])


FILES = {path.name: _read(path) for path in Path(__file__).parent.iterdir() if path.suffix in TYPES}


def is_for_browser(request: web.Request) -> bool:
    """Return True if a browser asks for `/`; programs get JSON there."""
    return request.path == "/" and "text/html" in request.headers.get("Accept", "")


def page(request: web.Request) -> web.Response:
    """Return the page."""
    return _answer(request, "index.html")


async def show_file(request: web.Request) -> web.Response:
    """Return a file of the page at `/`."""
    if (name := request.match_info["file"]) not in FILES:
        raise web.HTTPNotFound(text="the page has no such file")
    return _answer(request, name)


def _answer(request: web.Request, name: str) -> web.Response:
    file = FILES[name]
    headers = {**HEADERS, "ETag": f'"{file.etag}"'}
    if any(file.etag == each.value for each in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.body, content_type=file.content_type, charset="utf-8", headers=headers)
