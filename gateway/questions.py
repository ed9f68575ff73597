"""What is posted that is no request for an answer of the model's: the end of another request, and tokens."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from engine import wire
from engine.errors import InvalidRequest
from gateway.answers import CALL, in_one_piece
from gateway.body import parse_body, read_payload
from gateway.intake import Room
from gateway.openai.request import chat_source
from gateway.parts import BACKEND, CONFIG, INTAKE, NATIVE, OPENAI

MAX_ABORT_BYTES = 8 << 10  # a req_id, however escaped


async def abort(request: web.Request) -> web.Response:
    """Ends the open request with this `req_id`, whichever worker has it."""
    call = request[CALL]
    call.protocols = [NATIVE]
    async with _body(request, MAX_ABORT_BYTES) as body:
        if "req_id" not in body:
            raise InvalidRequest("`{field}` is missing", field="req_id")
        req_id = wire.FIELDS["req_id"].check("req_id", body["req_id"])
        return in_one_piece((await request.app[BACKEND].abort(req_id, call.owner)).fields())


async def tokenize(request: web.Request) -> web.Response:
    """The tokens of a prompt, or of a chat."""
    return await _about_tokens(request, wire.TOKENIZE)


async def detokenize(request: web.Request) -> web.Response:
    """The text of tokens."""
    return await _about_tokens(request, wire.DETOKENIZE)


async def _about_tokens(request: web.Request, kind: str) -> web.Response:
    request[CALL].protocols = [OPENAI]
    async with _body(request, request.app[CONFIG].max_body_bytes) as body:
        if kind == wire.TOKENIZE and body.get("messages") is not None:
            body |= chat_source(body)
        return in_one_piece(_without_end((await request.app[BACKEND].about_tokens({kind: body})).fields()))


def _without_end(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "is_end"}


@contextlib.asynccontextmanager
async def _body(request: web.Request, limit: int) -> AsyncIterator[dict[str, Any]]:
    """The room that it takes is its own until the end."""
    room = Room(request.app[INTAKE])
    try:
        payload = await read_payload(request, limit, room)
        async with request.app[INTAKE].reading(len(payload)):
            body = parse_body(payload)
        yield body
    finally:
        room.give_back()


ROUTES = {"/v1/abort": abort, "/tokenize": tokenize, "/detokenize": detokenize}
FIELDS = {
    "/v1/abort": {"req_id": wire.FIELDS["req_id"]},
    "/tokenize": wire.TOKENIZE_FIELDS,
    "/detokenize": wire.DETOKENIZE_FIELDS,
}
NEEDS = {"/v1/abort": ("req_id",), "/tokenize": ("prompt", "messages"), "/detokenize": ("tokens",)}
SAMPLES = {
    "/v1/abort": wire.Aborted("1", True).fields(),
    "/tokenize": _without_end(wire.Tokenized([1], 8192).fields()),
    "/detokenize": _without_end(wire.Detokenized("Hello").fields()),
}
