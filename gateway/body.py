"""The JSON object of a request: read within a size and a time, whatever its content type says."""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Any

from aiohttp import web

from engine import wire
from engine.errors import InvalidRequest
from gateway.backend import timeout
from gateway.body_memory import BodyMemoryReservation

PIECE = 1 << 12  # bytes that are unpacked at once: each gzip member, of 20 or more, copies what is left of them
BODY_TIMEOUT_S = 60.0  # for all of a body; one whose later chunks are malformed never ends otherwise


async def read_payload(request: web.Request, limit: int, room: BodyMemoryReservation) -> bytes:
    """A length beyond the limit is refused before a byte is read, and so is one that there is no room for."""
    if (length := request.content_length or 0) > limit:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=length)
    room.reserve(length)
    payload = bytearray()
    try:
        async with timeout(BODY_TIMEOUT_S):
            async for piece in request.content.iter_any():
                payload += piece
                if len(payload) > limit:
                    raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=len(payload))
                room.reserve(len(payload))
    except asyncio.TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the request body was not complete within {BODY_TIMEOUT_S:g} s") from None
    unpacked = _unpacked(bytes(payload), request.headers.get("Content-Encoding", "identity"), limit)
    room.reserve(len(unpacked))
    return unpacked


def parse_body(payload: bytes) -> dict[str, Any]:
    try:
        body = json.loads(payload)
    except RecursionError:
        raise InvalidRequest("the request is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"the request is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the request must be a JSON object, it is {wire.kind_of(body)}")
    return wire.check_keys(body)


def _unpacked(payload: bytes, encoding: str, limit: int) -> bytes:
    """aiohttp would unpack all that comes: a few megabytes can be gigabytes, and nobody is served meanwhile."""
    encoding = encoding.strip().lower() or "identity"
    if encoding == "identity":
        return payload
    if encoding not in ("gzip", "deflate"):
        raise InvalidRequest("the Content-Encoding of the request is not supported, gzip and deflate are")
    is_raw = encoding == "deflate" and payload[:1] and payload[0] & 0x0F != zlib.DEFLATED
    wbits = -zlib.MAX_WBITS if is_raw else zlib.MAX_WBITS | 32  # 32: gzip or zlib, as it begins
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
            raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=len(unpacked))
        at += len(piece) - len(unpacker.unused_data)
    if not unpacker.eof:
        raise InvalidRequest(f"the request is not valid {encoding}, its end is missing")
    return bytes(unpacked)
