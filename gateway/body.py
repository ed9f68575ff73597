"""Request bodies: read within limits of size and time, decompressed, and parsed as a JSON object.

The content type is ignored.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Any

from aiohttp import web

from engine import wire
from engine.errors import InvalidRequest
from gateway.app_keys import CONFIG
from gateway.backend import timeout
from gateway.body_memory import BodyMemoryReservation

PIECE = 1 << 12  # bytes decompressed at once; small, because each gzip member (20 bytes or more) copies the rest
BODY_TIMEOUT_S = 60.0  # for the whole body; without it a body with malformed later chunks would never end


async def read_payload(request: web.Request, limit: int, reservation: BodyMemoryReservation) -> bytes:
    """Return the decompressed body of at most `limit` bytes.

    The Content-Length is checked against the limit and against the memory budget before a byte is read. Raise
    HTTPRequestEntityTooLarge, HTTPRequestTimeout, Overloaded, or InvalidRequest for a wrong Content-Encoding.
    """
    if (length := request.content_length or 0) > limit:
        raise _too_large(request, limit)
    reservation.reserve(length)
    payload = bytearray()
    try:
        async with timeout(BODY_TIMEOUT_S):
            async for piece in request.content.iter_any():
                payload += piece
                if len(payload) > limit:
                    raise _too_large(request, limit)
                reservation.reserve(len(payload))
    except asyncio.TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the request body was not complete within {BODY_TIMEOUT_S:g} s") from None
    unpacked = _unpacked(bytes(payload), request.headers.get("Content-Encoding", "identity"), limit)
    if unpacked is None:
        raise _too_large(request, limit)
    reservation.reserve(len(unpacked))
    return unpacked


def parse_body(payload: bytes) -> dict[str, Any]:
    """Return the JSON object in `payload`. Raise InvalidRequest if there is none."""
    if not payload:
        raise InvalidRequest("the request has no body, it must have a JSON object")
    try:
        body = json.loads(payload)
    except RecursionError:
        raise InvalidRequest("the request is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"the request is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the request must be a JSON object, it is {wire.kind_of(body)}")
    return wire.check_keys(body)


def _too_large(request: web.Request, limit: int) -> web.HTTPRequestEntityTooLarge:
    name = " (MAX_BODY_BYTES)" if limit == request.app[CONFIG].max_body_bytes else ""
    text = f"the request body is larger than the limit of {limit} bytes{name}"
    return web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=limit + 1, text=text)


def _unpacked(payload: bytes, encoding: str, limit: int) -> bytes | None:
    """Return the decompressed body, or None if it is larger than `limit`.

    Decompression stops at `limit` bytes: aiohttp's own would expand a few megabytes to gigabytes and block the event
    loop.
    """
    encoding = encoding.strip().lower() or "identity"
    if encoding == "identity":
        return payload
    if encoding not in ("gzip", "deflate"):
        shown = wire.shown(encoding)
        raise InvalidRequest(f"the Content-Encoding {shown} of the request is not supported, gzip and deflate are")
    is_raw = encoding == "deflate" and payload[:1] and payload[0] & 0x0F != zlib.DEFLATED
    wbits = -zlib.MAX_WBITS if is_raw else zlib.MAX_WBITS | 32  # 32: detect gzip or zlib by the header
    unpacker, unpacked, at = zlib.decompressobj(wbits), bytearray(), 0
    while piece := payload[at : at + PIECE]:
        try:
            if unpacker.eof and encoding != "gzip":
                raise zlib.error("more than one stream")
            if unpacker.eof:  # another member (RFC 1952)
                unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
            unpacked += unpacker.decompress(piece, limit + 1 - len(unpacked))
        except zlib.error:
            raise InvalidRequest(f"the request is not valid {encoding}") from None
        if len(unpacked) > limit:
            return None
        at += len(piece) - len(unpacker.unused_data)
    if not unpacker.eof:
        raise InvalidRequest(f"the request is not valid {encoding}, its end is missing")
    return bytes(unpacked)
