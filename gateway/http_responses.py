"""HTTP responses in every form: complete, streamed, or an error. Their content is produced by the protocols."""

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
SURELY_BUFFERED = 2**15  # bytes; smaller writes never wait for the client
NOT_RETRYABLE = (DuplicateRequest, TimedOut)  # OpenAI's client must not retry these, because a retry fails as well
Answers = AsyncGenerator[tuple[int, Delta], None]  # (index of the request, answer)


def json_response(fields: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return `fields` as a JSON response."""
    return web.Response(body=dump(fields), status=status, content_type="application/json", headers=headers)


async def gather(request: web.Request, exchange: Exchange, answers: Answers) -> web.Response:
    """Return one complete response after the last answer of every request has arrived."""
    async with contextlib.aclosing(answers):
        async for index, answer in answers:
            _note_length(request[CONTEXT], answer)
            exchange.gather(index, answer)
    return json_response(exchange.whole())


async def stream(request: web.Request, exchange: Exchange, answers: Answers) -> web.StreamResponse:
    """Stream one event per write and return the finished response.

    The HTTP status is sent with the first event. An earlier failure is raised and keeps its own status; a later one
    becomes the last event. A client that reads nothing for the request timeout is treated as disconnected.
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
    response = response or await _begin(request)  # a client that resumes a stream may already have all of it
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
        raise ConnectionResetError("the client has disconnected")
    if transport.get_write_buffer_size() + len(event) < SURELY_BUFFERED:  # the usual case needs no timer
        await response.write(event)
        return
    try:
        async with timeout(request.app[REQUEST_TIMEOUT]):
            await response.write(event)
    except asyncio.TimeoutError:
        raise ConnectionResetError("the client does not read its answer") from None


# --- errors -----------------------------------------------------------------------------------------------------


def refusal(error: RequestError, request: web.Request) -> web.Response:
    """Return the error response of a request that failed before its first byte.

    A request whose body was not readable may belong to several protocols; the response then has the error fields of all
    of them in one object.
    """
    headers = {}
    if isinstance(error, Overloaded) or error.code == 503:
        headers["Retry-After"] = str(error.retry_after_s or 1)
    if isinstance(error, NOT_RETRYABLE):
        headers["x-should-retry"] = "false"
    if error.code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    context = request[CONTEXT]
    fields: dict[str, Any] = {}
    for protocol in context.protocols:
        fields |= protocol.error(error, context)
    return json_response(fields, error.code, headers)


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Filter records of aiohttp's server log.

    Malformed HTTP is logged in one line without its bytes and traceback. A client that disconnects before `100
    Continue` is sent (`Expect: 100-continue`) is not logged, because it is no error.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.exc_info = None
    return not isinstance(error, ConnectionError)


def as_known(error: Exception) -> RequestError:
    """Return `error` as a RequestError.

    Other exceptions are bugs of the gateway: their text goes to the log and not to the client.
    """
    if isinstance(error, (RequestError, RecursionError)):
        return as_request_error(error)
    log.error("a request failed unexpectedly", exc_info=error)
    return RequestError("internal error of the gateway")
