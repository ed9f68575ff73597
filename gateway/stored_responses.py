"""Endpoints of stored responses: retrieve, list the input items, cancel, delete, run in the background, and continue a
previous one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from engine import wire
from engine.errors import Cancelled, InvalidRequest, UnknownAnswer
from gateway import http_responses
from gateway.app_keys import BACKEND, RESPONSES, name_adapter
from gateway.endpoint import Endpoint
from gateway.http_responses import CONTEXT, REQUEST_TIMEOUT, json_response
from gateway.request_id import UniqueIdBackend
from gateway.responses import PATH, PREVIOUS
from gateway.responses.input_items import page_of


async def retrieve_response(request: web.Request) -> web.StreamResponse:
    """Return a stored response as far as it has been generated, or its events with `stream`."""
    if not _is_streamed(request):
        return await _answer(request, wire.RETRIEVE)
    context = request[CONTEXT]
    context.protocols = [RESPONSES]
    stored = await _ask(request, _action_body(_response_id(request), wire.RETRIEVE))
    exchange = RESPONSES.resumed(stored, context, _starting_after(request))
    context.exchange = exchange
    name_adapter(context, exchange, exchange.completion.model)
    context.request_id = exchange.answer_id
    if stored.status in (wire.QUEUED, wire.IN_PROGRESS):
        body = wire.with_owner(exchange.requests[0], context.owner)
        return await http_responses.stream(request, exchange, _growing(request, body))
    return await http_responses.stream(request, exchange, _complete(stored))


async def _growing(request: web.Request, body: dict[str, Any]) -> http_responses.Answers:
    async with contextlib.aclosing(request.app[BACKEND].generate(body, request.app[REQUEST_TIMEOUT])) as growing:
        async for answer in growing:
            yield 0, answer


async def _complete(stored: wire.StoredResponse) -> http_responses.Answers:
    if stored.answer:
        yield 0, stored.answer
    if stored.status in (wire.FAILED, wire.CANCELLED):
        raise stored.error or Cancelled("the response was cancelled")


async def list_input_items(request: web.Request) -> web.Response:
    """Return a page of the input items of a stored response."""
    request[CONTEXT].protocols = [RESPONSES]
    stored = await _ask(request, _action_body(_response_id(request), wire.RETRIEVE))
    return json_response(page_of(RESPONSES.input_items(stored), request.query))


async def cancel_response(request: web.Request) -> web.Response:
    """Cancel a background response."""
    return await _answer(request, wire.CANCEL)


async def delete_response(request: web.Request) -> web.Response:
    """Delete a stored response, and cancel it if it runs in the background."""
    return await _answer(request, wire.DELETE)


async def begin_in_background(request: web.Request, model: UniqueIdBackend, body: dict[str, Any]) -> web.Response:
    """Start a background response and return its object without waiting for the answer."""
    response = await model.begin_in_background(body, request.app[REQUEST_TIMEOUT])
    return json_response(RESPONSES.stored(response, request[CONTEXT]))


async def previous_of(request: web.Request, body: Mapping[str, Any]) -> wire.StoredResponse | None:
    """Return the response that the request continues, or None if it begins a conversation."""
    if request[CONTEXT].protocols != [RESPONSES] or body.get(PREVIOUS) is None:
        return None
    response_id = wire.FIELDS["req_id"].check(PREVIOUS, body[PREVIOUS])
    try:
        return await _ask(request, _action_body(response_id, wire.RETRIEVE))
    except UnknownAnswer as error:
        raise error.blaming(PREVIOUS) from None


async def _answer(request: web.Request, action: str) -> web.Response:
    context = request[CONTEXT]
    context.protocols = [RESPONSES]
    return json_response(RESPONSES.stored(await _ask(request, _action_body(_response_id(request), action)), context))


def _response_id(request: web.Request) -> str:
    return wire.FIELDS["req_id"].check("response_id", request.match_info["response_id"])


def _is_streamed(request: web.Request) -> bool:
    given = request.query.get("stream", "false")
    if given not in ("true", "false"):
        raise InvalidRequest("`{field}` is {value}, it must be true or false", field="stream", value=wire.shown(given))
    return given == "true"


def _starting_after(request: web.Request) -> int:
    given = request.query.get("starting_after", "-1")
    if given != "-1" and not (given.isascii() and given.isdigit() and len(given) < 10):
        text = "`{field}` is {value}, it must be the `sequence_number` of an event"
        raise InvalidRequest(text, field="starting_after", value=wire.shown(given))
    return int(given)


async def _ask(request: web.Request, body: Mapping[str, Any]) -> wire.StoredResponse:
    asked = wire.with_owner(dict(body), request[CONTEXT].owner)
    return await request.app[BACKEND].stored_response(asked, request.app[REQUEST_TIMEOUT])


def _action_body(response_id: str, action: str) -> dict[str, Any]:
    return {wire.STORED: {"id": response_id, "action": action}}


RESPONSE_PATH = f"{PATH}/{{response_id}}"
ENDPOINTS: Sequence[Endpoint] = (  # without samples, because the form of a response depends on its state
    Endpoint(RESPONSE_PATH, retrieve_response),
    Endpoint(RESPONSE_PATH, delete_response, "DELETE"),
    Endpoint(f"{RESPONSE_PATH}/input_items", list_input_items),
    Endpoint(f"{RESPONSE_PATH}/cancel", cancel_response, "POST"),
)
