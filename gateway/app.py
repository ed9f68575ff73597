"""The routes of the service port, and which protocol a body speaks. One worker's application, made around a Backend.

On /v1/chat/completions and /v1/completions the fields decide:
- `text` or `input_ids`: native;
- `prompt`: OpenAI's;
- `messages` and a field that only the native protocol has (`req_id`, `max_dec_len`, `topp`, ...): native, so the
  documented multi-turn example works; `timeout` counts where `model`, which OpenAI's clients always send, is absent;
- anything else: OpenAI's, chat or completion as the path says.
Under the documented base URL (http://host:9965/v1/chat/completions) the routes are OpenAI's alone.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from engine.errors import EngineUnavailable, InvalidRequest, RequestError
from gateway import answers, native, openai
from gateway.answers import CALL, SETTINGS, Call, Dialect
from gateway.backend import Backend, GatewaySettings, timeout
from gateway.health import Shared, as_response, readiness
from gateway.openai_request import CHECKS, PASSED_ON

log = logging.getLogger(__name__)

BACKEND = web.AppKey("backend", Backend)
READY = web.AppKey("ready", Shared)
RUNNING = web.AppKey("running", list)  # the requests being answered
DRAINING = web.AppKey("draining", asyncio.Event)

IN_BOTH = {*PASSED_ON, "text", "input_ids", "messages", "max_tokens", "logprobs", "stream", "timeout", "model"}
NATIVE_ONLY = frozenset(CHECKS) - IN_BOTH
CORS = {
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "*, Authorization, Content-Type",
    "Access-Control-Max-Age": "86400",
}
BODY_TIMEOUT_S = 60.0  # for all of a body; one whose later chunks are malformed never ends otherwise
UNGUARDED = ("/health",)
CLIENT_LEFT = 499  # in our log only
STARTED = int(time.time())
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(backend: Backend, settings: GatewaySettings | None = None) -> web.Application:
    settings = settings or GatewaySettings()
    app = web.Application(middlewares=[accounted, errors_as_json], client_max_size=settings.max_body_bytes)
    app[BACKEND] = backend
    app[SETTINGS] = settings
    app[READY] = readiness(backend, settings.probe_timeout_s)
    app[RUNNING] = []
    app[DRAINING] = asyncio.Event()
    if settings.cors_allow_origin:
        app.on_response_prepare.append(_add_cors)
    app.on_cleanup.append(_close_backend)
    base = "/v1/chat/completions"  # the documented base URL of OpenAI's client
    app.add_routes(
        [
            web.get("/", show_endpoints),
            web.get("/health", show_health),
            *[web.get(f"{prefix}/models", list_models) for prefix in ("/v1", base)],
            *[web.get(f"{prefix}/models/{{model:.+}}", show_model) for prefix in ("/v1", base)],
            web.post(base, chat_or_native),
            web.post("/v1/completions", completion_or_native),
            web.post(f"{base}/chat/completions", chat),
            web.post(f"{base}/completions", completion),
        ]
    )
    return app


# --- completions ------------------------------------------------------------------------------------------------


async def chat_or_native(request: web.Request) -> web.StreamResponse:
    return await _complete(request, is_chat=True, may_be_native=True)


async def completion_or_native(request: web.Request) -> web.StreamResponse:
    return await _complete(request, is_chat=False, may_be_native=True)


async def chat(request: web.Request) -> web.StreamResponse:
    return await _complete(request, is_chat=True, may_be_native=False)


async def completion(request: web.Request) -> web.StreamResponse:
    return await _complete(request, is_chat=False, may_be_native=False)


async def _complete(request: web.Request, is_chat: bool, may_be_native: bool) -> web.StreamResponse:
    if not may_be_native:
        request[CALL].dialect = Dialect.OPENAI
    body = await _read_body(request)
    if may_be_native:
        request[CALL].dialect = Dialect.NATIVE if is_native(body) else Dialect.OPENAI
    backend = request.app[BACKEND]
    if request[CALL].dialect is Dialect.NATIVE:
        return await native.complete(request, body, backend)
    return await openai.complete(request, body, backend, is_chat)


def is_native(body: dict[str, Any]) -> bool:
    given = {key for key, value in body.items() if value is not None}
    if given & {"text", "input_ids"}:
        return True
    return "prompt" not in given and bool(given & NATIVE_ONLY or ("timeout" in given and "model" not in given))


async def _read_body(request: web.Request) -> dict[str, Any]:
    """Whatever the content type says. A length beyond the limit is refused before a byte is read."""
    limit = request.app[SETTINGS].max_body_bytes
    if (request.content_length or 0) > limit:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=request.content_length)
    try:
        async with timeout(BODY_TIMEOUT_S):
            payload = await request.read()
    except asyncio.TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the request body was not complete within {BODY_TIMEOUT_S:g} s") from None
    payload = _unpacked(payload, request.headers.get("Content-Encoding", "identity"), limit)
    try:
        body = json.loads(payload)
    except RecursionError:
        raise InvalidRequest("the request is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"the request is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the request must be a JSON object, it is {type(body).__name__}")
    return body


def _unpacked(payload: bytes, encoding: str, limit: int) -> bytes:
    """aiohttp would unpack all that comes: a few megabytes can be gigabytes, and nobody is served meanwhile."""
    encoding = encoding.strip().lower() or "identity"
    if encoding == "identity":
        return payload
    if encoding not in ("gzip", "deflate"):
        raise InvalidRequest("the Content-Encoding of the request is not supported, gzip and deflate are")
    is_raw = encoding == "deflate" and payload[:1] and payload[0] & 0x0F != zlib.DEFLATED
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS if is_raw else zlib.MAX_WBITS | 32)  # 32: gzip or zlib, as it begins
    try:
        payload = unpacker.decompress(payload, limit + 1)
    except zlib.error:
        raise InvalidRequest(f"the request is not valid {encoding}") from None
    if len(payload) > limit:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=len(payload))
    if not unpacker.eof:
        raise InvalidRequest(f"the request is not valid {encoding}, its end is missing")
    return payload


# --- facts ------------------------------------------------------------------------------------------------------


async def show_endpoints(request: web.Request) -> web.Response:
    paths = {route.resource.canonical for route in request.app.router.routes() if route.resource is not None}
    return answers.answer({"model": request.app[SETTINGS].model_name, "endpoints": sorted(paths)})


async def show_health(request: web.Request) -> web.Response:
    return as_response(await request.app[READY]())


async def list_models(request: web.Request) -> web.Response:
    return answers.answer({"object": "list", "data": [await _model(request.app)]})


async def show_model(request: web.Request) -> web.Response:
    request[CALL].dialect = Dialect.OPENAI
    model = await _model(request.app)
    if request.match_info["model"] != model["id"]:
        raise web.HTTPNotFound(text=f"the served model is `{model['id']}`")
    return answers.answer(model)


async def _model(app: web.Application) -> dict[str, Any]:
    name = app[SETTINGS].model_name
    facts = (await app[READY]()).facts
    model = {"id": name, "object": "model", "created": STARTED, "owned_by": "paddle", "root": name}
    return {**model, "max_model_len": facts.get("model_len")}


# --- around every request ---------------------------------------------------------------------------------------


@web.middleware
async def accounted(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts the request as running, and logs its end in one line without a word of the client's."""
    call = request[CALL] = Call()
    running = request.app[RUNNING]
    running.append(request)
    start, status = time.monotonic(), CLIENT_LEFT
    try:
        response = await handler(request)
        status = call.late_status or response.status
        return response
    finally:
        running.remove(request)
        resource = request.match_info.route.resource
        log.info(
            "%s %s %s %.3fs %s %d tokens",
            request.method if request.method in ("GET", "POST", "HEAD", "OPTIONS") else "OTHER",
            resource.canonical if resource else "-",
            status,
            time.monotonic() - start,
            call.dialect.value,
            call.num_tokens,
        )


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.method == "OPTIONS":  # a browser asks before it posts
        return web.Response(status=204)
    try:
        _check_key(request)
        if request.app[DRAINING].is_set():
            raise EngineUnavailable("the server is stopping")
        return await handler(request)
    except web.HTTPException as error:
        return _http_refusal(error, request)
    except ConnectionError:  # the client has left, or does not read
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=CLIENT_LEFT)
    except Exception as error:
        return answers.refusal(answers.as_known(error), request)


class WrongKey(InvalidRequest):
    kind = "invalid_api_key"
    code = 401


def _check_key(request: web.Request) -> None:
    key = request.app[SETTINGS].api_key
    if not key or request.path in UNGUARDED:
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    is_right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key.encode())
    if scheme.lower() != "bearer" or not is_right:
        request[CALL].dialect = Dialect.OPENAI
        raise WrongKey("the API key is missing or wrong, the header must be `Authorization: Bearer <key>`")


def _http_refusal(error: web.HTTPException, request: web.Request) -> web.Response:
    """aiohttp's own refusals: 404, 405, 408, 413."""
    if error.status == 405:
        message = f"this path does not take {request.method}, it takes {error.headers['Allow']}"
    elif error.status == 413:
        message = f"the request body is larger than the limit of {request.app[SETTINGS].max_body_bytes} bytes"
    elif request.match_info.route.resource is None:
        message = "no such path, see GET / for what there is"
    else:
        message = error.text or error.reason
    known = (InvalidRequest if error.status < 500 else RequestError)(message)
    known.code = error.status
    response = answers.refusal(known, request)
    if error.status == 408:
        response.force_close()  # what still comes of the body is no request
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


async def _add_cors(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(CORS)
    response.headers["Access-Control-Allow-Origin"] = request.app[SETTINGS].cors_allow_origin


async def _close_backend(app: web.Application) -> None:
    await app[BACKEND].close()
