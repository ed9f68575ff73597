"""JSON on its way out: answers in one piece, streams, and errors in the dialect of the client. Decides no content."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from aiohttp import web

from engine import wire
from engine.errors import DuplicateRequest, InvalidRequest, Overloaded, PromptTooLong, RequestError, TimedOut
from gateway.backend import GatewaySettings, timeout

log = logging.getLogger(__name__)

SETTINGS = web.AppKey("settings", GatewaySettings)
OPENAI_TYPES = {400: "invalid_request_error", 404: "not_found_error", 429: "rate_limit_error"}
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)
SURELY_BUFFERED = 2**15  # bytes; a write that stays below does not wait for the client
NOT_AGAIN = (DuplicateRequest, TimedOut)  # OpenAI's client would repeat these by itself, and in vain


class Dialect(Enum):
    """Which error object a client reads. UNKNOWN gets both in one: its request was not readable."""

    NATIVE = "native"
    OPENAI = "openai"
    UNKNOWN = "-"


@dataclass(eq=False)
class Call:
    """What is known of an HTTP request besides its body: for the error object and for the log."""

    dialect: Dialect = Dialect.UNKNOWN
    req_id: str | None = None
    num_tokens: int = 0  # generated
    late_status: int | None = None  # of a failure after the first byte


CALL = web.RequestKey("call", Call)


def dump(fields: Any) -> bytes:
    """Compact, readable in a terminal, and one line for every reader.

    Some clients split lines at U+0085, U+2028 and U+2029, which JSON lets pass as they are: these are escaped. A lone
    surrogate, which has no UTF-8, becomes "?".
    """
    text = ENCODER.encode(fields)
    if not text.isascii():
        text = text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")
    return text.encode("utf-8", "replace")


def answer(fields: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=dump(fields), status=status, content_type="application/json", headers=headers)


# --- errors -----------------------------------------------------------------------------------------------------


def failure(error: RequestError, dialect: Dialect, req_id: str | None = None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if dialect is not Dialect.OPENAI:
        fields |= {**wire.read_answer(wire.failure(error, req_id)), "result": ""}
    if dialect is not Dialect.NATIVE:
        fields["error"] = {
            "message": str(error),
            "type": OPENAI_TYPES.get(error.code, "invalid_request_error" if error.code < 500 else "server_error"),
            "param": getattr(error, "param", None),
            "code": "context_length_exceeded" if isinstance(error, PromptTooLong) else error.kind,
        }
    return fields


def refusal(error: RequestError, request: web.Request) -> web.Response:
    """The whole response of a request that failed before its first byte."""
    headers = {}
    if isinstance(error, Overloaded) or error.code == 503:
        headers["Retry-After"] = "1"
    if isinstance(error, NOT_AGAIN):
        headers["x-should-retry"] = "false"
    if error.code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    call = request[CALL]
    return answer(failure(error, call.dialect, call.req_id), error.code, headers)


# --- streams ----------------------------------------------------------------------------------------------------


async def stream(
    request: web.Request,
    events: AsyncGenerator[bytes, None],
    content_type: str,
    as_event: Callable[[dict[str, Any]], bytes],
) -> web.StreamResponse:
    """One write an event. The status is spent with the first one: a failure before it is raised, one after it is the
    last event. A client that does not read for as long as a model may be silent is taken for gone.
    """
    async with contextlib.aclosing(events):
        first = await anext(events)
        headers = {"Content-Type": content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        try:
            await _write(request, response, first)
            async for event in events:
                await _write(request, response, event)
        except ConnectionError:
            raise
        except Exception as error:
            known = as_known(error)
            call = request[CALL]
            call.late_status = known.code
            await _write(request, response, as_event(failure(known, call.dialect, call.req_id)))
    await response.write_eof()
    return response


async def _write(request: web.Request, response: web.StreamResponse, event: bytes) -> None:
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has left")
    if transport.get_write_buffer_size() + len(event) < SURELY_BUFFERED:  # the usual case, without a timer
        await response.write(event)
        return
    try:
        async with timeout(request.app[SETTINGS].request_timeout_s):
            await response.write(event)
    except asyncio.TimeoutError:
        raise ConnectionResetError("the client does not read its answer") from None


def as_known(error: Exception) -> RequestError:
    """Anything but a RequestError is a bug of ours: its text is for our log only."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, RecursionError):
        return InvalidRequest("the request is nested too deeply")
    log.error("a request failed unexpectedly", exc_info=error)
    return RequestError("internal error of the gateway")
