"""Answers on their way out over HTTP: whole, as a stream, as a refusal. What they say is the protocols' affair."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from engine.errors import DuplicateRequest, Overloaded, RequestError, TimedOut, as_request_error
from engine.wire import Delta
from gateway.backend import timeout
from gateway.json_encoder import dump
from gateway.protocol import Exchange, RequestContext

log = logging.getLogger(__name__)

CONTEXT = web.RequestKey("context", RequestContext)
REQUEST_TIMEOUT = web.AppKey("request_timeout", float)  # seconds
SURELY_BUFFERED = 2**15  # bytes; a write that stays below does not wait for the client
NOT_AGAIN = (DuplicateRequest, TimedOut)  # OpenAI's client would repeat these by itself, and in vain
Answers = AsyncGenerator[tuple[int, Delta], None]  # with the index of the request


def json_response(fields: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=dump(fields), status=status, content_type="application/json", headers=headers)


async def gather(request: web.Request, exchange: Exchange, answers: Answers) -> web.Response:
    async with contextlib.aclosing(answers):
        async for index, answer in answers:
            _note_length(request[CONTEXT], answer)
            exchange.gather(index, answer)
    return json_response(exchange.whole())


async def stream(request: web.Request, exchange: Exchange, answers: Answers) -> web.StreamResponse:
    """One write an event. The status is spent with the first one: a failure before it is raised, one after it is the
    last event. A client that does not read for as long as a model may be silent is taken for gone.
    """
    response = None
    async with contextlib.aclosing(answers):
        try:
            async for index, answer in answers:
                _note_length(request[CONTEXT], answer)
                if event := exchange.event(index, answer):
                    response = response or await _begin(request)
                    await _write(request, response, event)
        except ConnectionError:
            raise
        except Exception as error:
            if response is None:
                raise
            known, context = as_known(error), request[CONTEXT]
            context.late_status = known.code
            await _write(request, response, context.protocols[0].error_event(known, context))
    response = response or await _begin(request)  # a client that resumes a stream may have all of it
    await response.write_eof()
    return response


def _note_length(context: RequestContext, answer: Delta) -> None:
    if answer.max_dec_len is not None:
        context.max_tokens = min(answer.max_dec_len, context.max_tokens or answer.max_dec_len)


async def _begin(request: web.Request) -> web.StreamResponse:
    [protocol] = request[CONTEXT].protocols
    headers = {"Content-Type": protocol.content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response


async def _write(request: web.Request, response: web.StreamResponse, event: bytes) -> None:
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has left")
    if transport.get_write_buffer_size() + len(event) < SURELY_BUFFERED:  # the usual case, without a timer
        await response.write(event)
        return
    try:
        async with timeout(request.app[REQUEST_TIMEOUT]):
            await response.write(event)
    except asyncio.TimeoutError:
        raise ConnectionResetError("the client does not read its answer") from None


# --- errors -----------------------------------------------------------------------------------------------------


def refusal(error: RequestError, request: web.Request) -> web.Response:
    """The whole response of a request that failed before its first byte. One that was not readable may have spoken
    several protocols: it gets the errors of all of them in one object."""
    headers = {}
    if isinstance(error, Overloaded) or error.code == 503:
        headers["Retry-After"] = str(error.retry_after_s or 1)
    if isinstance(error, NOT_AGAIN):
        headers["x-should-retry"] = "false"
    if error.code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    context = request[CONTEXT]
    fields: dict[str, Any] = {}
    for protocol in context.protocols:
        fields |= protocol.error(error, context)
    return json_response(fields, error.code, headers)


def is_worth_logging(record: logging.LogRecord) -> bool:
    """A filter: aiohttp logs what is no HTTP with its bytes and a traceback: the one line without them is enough. A
    client that leaves before it is told to go on (`Expect: 100-continue`) is no error."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.exc_info = None
    return not isinstance(error, ConnectionError)


def as_known(error: Exception) -> RequestError:
    """Anything but a RequestError is a bug of ours: its text is for our log only."""
    if isinstance(error, (RequestError, RecursionError)):
        return as_request_error(error)
    log.error("a request failed unexpectedly", exc_info=error)
    return RequestError("internal error of the gateway")
