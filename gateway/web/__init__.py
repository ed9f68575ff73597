"""The page at `/`: a chat with the model and a live view of the server. Its files lie here as a browser gets them, with
nothing to build, and ask nobody but this server. What the model or another user has written is put into the page as
text only (markdown.js, dom.js); the headers see to it that a slip would run nothing."""

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
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",  # no text ever becomes HTML or a script
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "Cache-Control": "no-cache",  # kept, and asked for by its ETag: a new server is a new page at once
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
}


class StaticFile(NamedTuple):
    content_type: str
    body: bytes
    etag: str


def _read(path: Path) -> StaticFile:
    body = path.read_bytes()
    return StaticFile(TYPES[path.suffix], body, hashlib.sha256(body).hexdigest()[:16])


FILES = {path.name: _read(path) for path in Path(__file__).parent.iterdir() if path.suffix in TYPES}


def is_for_people(request: web.Request) -> bool:
    """A browser's address bar asks so; programs that ask for `/` get JSON."""
    return request.path == "/" and "text/html" in request.headers.get("Accept", "")


def page(request: web.Request) -> web.Response:
    return _answer(request, "index.html")


async def show_file(request: web.Request) -> web.Response:
    """A file of the page at `/`."""
    if (name := request.match_info["file"]) not in FILES:
        raise web.HTTPNotFound(text="the page has no such file")
    return _answer(request, name)


def _answer(request: web.Request, name: str) -> web.Response:
    file = FILES[name]
    headers = {**HEADERS, "ETag": f'"{file.etag}"'}
    if any(file.etag == each.value for each in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.body, content_type=file.content_type, charset="utf-8", headers=headers)
