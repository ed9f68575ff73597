"""The routes of the service port, and which protocol a request speaks. One worker's application, made around a Backend.

A path has the protocols that name it. Where there are several, the first that says so has the body.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from aiohttp import web

from engine import wire
from engine.errors import EngineUnavailable, InvalidRequest, RequestError
from engine.settings.config import Config
from engine.settings.served import OWN_NAME, ServedModel
from gateway import answers, facts, half_closed, keys, questions
from gateway.answers import CALL, REQUEST_TIMEOUT
from gateway.backend import Backend
from gateway.body import parse_body, read_payload
from gateway.choices import most_at_once, side_by_side
from gateway.document import as_document
from gateway.heads import peer_of
from gateway.health import ANSWER_WITHIN_S, readiness
from gateway.intake import Intake, Room
from gateway.lasting import LastingBackend
from gateway.openai.dialect import dialect_of
from gateway.parts import (
    ANTHROPIC,
    BACKEND,
    BEGUN,
    CONFIG,
    DOCUMENT,
    DRAINING,
    EMBEDDINGS,
    INTAKE,
    LABELS,
    NATIVE,
    OPENAI,
    RANKINGS,
    READY,
    RESPONSES,
    RUNNING,
    SERVED,
    TRITON,
    num_labels,
    served_name,
)
from gateway.protocol import Call, ClientProtocol, Exchange
from gateway.spans import begin_tracing, traced
from gateway.triton import PREFIX, ROOTS
from gateway.triton import facts as triton
from gateway.web import is_for_people

log = logging.getLogger(__name__)

PROTOCOLS: Sequence[ClientProtocol] = (NATIVE, OPENAI, RESPONSES, ANTHROPIC, EMBEDDINGS, *RANKINGS, TRITON)

REQUEST_TIMEOUT_S = 300.0  # without a new answer of the model, unless a request says otherwise

CORS = {
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "*, Authorization, Content-Type",
    "Access-Control-Max-Age": "86400",
}
# A browser sends no key; they say nothing of the model.
UNGUARDED = (
    *("/health", "/ping", "/version", "/openapi.json", "/docs", "/page/{file}"),
    *("/v2/health/live", "/v2/health/ready"),
)
CLIENT_LEFT = 499  # in our log only
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(backend: Backend, config: Config, request_timeout_s: float = REQUEST_TIMEOUT_S) -> web.Application:
    app = web.Application(middlewares=[accounted, errors_as_json], client_max_size=config.max_body_bytes)
    app[READY] = readiness(backend, ANSWER_WITHIN_S)
    app[SERVED] = ServedModel(config.run_path)
    app[BACKEND] = LastingBackend(backend, app[READY], app[SERVED])
    app[CONFIG] = config
    dialect_of(config)  # somebody's file may be wrong: nobody shall learn it from a request
    app[REQUEST_TIMEOUT] = request_timeout_s
    app[INTAKE] = Intake.share_of_worker(config)
    app[RUNNING], app[BEGUN] = [], set()
    app[LABELS] = {}
    begin_tracing(app, config)
    half_closed.allow(app)
    app[DRAINING] = asyncio.Event()
    if config.cors_allow_origin:
        app.on_response_prepare.append(_add_cors)
    app.on_cleanup.append(_close_backend)
    paths = dict.fromkeys(path for protocol in PROTOCOLS for path in protocol.paths)
    app.add_routes(
        [
            *[web.get(path, show) for path, show in {**facts.ROUTES, **triton.ROUTES}.items()],
            *[web.post(path, ask) for path, ask in questions.ROUTES.items()],
            *[web.post(path, complete) for path in paths],
            *[web.post(f"{root}/infer", triton.refuse_infer) for root in ROOTS],
        ]
    )
    app[DOCUMENT] = as_document(app, PROTOCOLS, UNGUARDED)
    return app


async def complete(request: web.Request) -> web.StreamResponse:
    """A request for an answer of the model, whatever its protocol."""
    call, app = request[CALL], request.app
    room = Room(app[INTAKE])
    try:
        payload = await read_payload(request, app[CONFIG].max_body_bytes, room)
        if call.protocols[0] in RANKINGS:
            call.num_labels = await num_labels(app)
        async with app[INTAKE].reading(len(payload)):
            call.exchange = exchange = _parse(payload, call)
        del payload
        timeout_s = exchange.timeout_s or app[REQUEST_TIMEOUT]
        bodies = [wire.with_owner(each, call.owner) for each in exchange.requests]
        if call.traceparent:
            bodies = [{**each, "traceparent": call.traceparent} for each in bodies]
        asks = [partial(app[BACKEND].generate, each, timeout_s) for each in bodies]
        running = side_by_side(asks, most_at_once(app[CONFIG]), timeout_s)
        if room.num_bytes:
            running = _giving_back(room, running)
        if exchange.stream:
            return await answers.stream(request, exchange, running)
        return await answers.gather(exchange, running)
    finally:
        room.give_back()


def _parse(payload: bytes, call: Call) -> Exchange:
    body = parse_body(payload)
    protocol = next(each for each in call.protocols if len(call.protocols) == 1 or each.speaks(body))
    call.protocols = [protocol]
    exchange = protocol.parse(body, call)
    if call.config.has_loras and protocol not in (NATIVE, TRITON):
        name = body.get("model") or OWN_NAME
        for each in exchange.requests if name not in (call.model_name, OWN_NAME) else ():
            each["lora_name"] = wire.FIELDS["lora_name"].check("model", name)
    return exchange


async def _giving_back(room: Room, running: answers.Answers) -> answers.Answers:
    """When the model has begun to answer."""
    async with contextlib.aclosing(running):
        async for each in running:
            room.give_back()
            yield each


def _protocols_of(path: str) -> Sequence[ClientProtocol]:
    """Those that a request may speak. Elsewhere than on their paths, the ones that share theirs."""
    others: list[ClientProtocol] = [TRITON] if f"{path}/".startswith(PREFIX) else [NATIVE, OPENAI]
    return [each for each in PROTOCOLS if path in each.paths] or questions.PROTOCOLS.get(path) or others


# --- around every request ---------------------------------------------------------------------------------------


@web.middleware
async def accounted(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts the request as running, and logs its end in one line without a word of the client's."""
    protocols, headers = _protocols_of(request.path), request.headers
    call = request[CALL] = Call(request.path, served_name(request.app), protocols, headers, config=request.app[CONFIG])
    running = request.app[RUNNING]
    running.append(request)
    if peer := peer_of(request.transport):
        request.app[BEGUN].add(peer)
    start, status = time.monotonic(), CLIENT_LEFT
    try:
        with traced(request, call) as ended:
            ended["status"] = status
            response = await handler(request)
            status = ended["status"] = call.late_status or response.status
        return response
    finally:
        running.remove(request)
        resource = request.match_info.route.resource
        log.info(
            "%s %s %s %.3fs %s%s %d tokens",
            request.method if request.method in ("GET", "POST", "HEAD", "OPTIONS") else "OTHER",
            resource.canonical if resource else "-",
            status,
            time.monotonic() - start,
            call.protocols[0].name if len(call.protocols) == 1 else "-",
            f" {call.owner.name}" if call.owner.name else "",
            call.exchange.num_tokens if call.exchange else 0,
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


def _check_key(request: web.Request) -> None:
    owners, call, resource = request.app[CONFIG].owners, request[CALL], request.match_info.route.resource
    is_open = is_for_people(request) or (resource is not None and resource.canonical in UNGUARDED)
    if owners and not is_open:
        try:
            bare = request.headers.get("x-api-key")  # of Anthropic's clients
            given = request.headers.get("Authorization", f"Bearer {bare}" if bare else "")
            call.owner = keys.owner_of(given, owners)
        except keys.WrongKey:
            call.protocols = [OPENAI] if OPENAI in call.protocols else call.protocols
            raise


def _http_refusal(error: web.HTTPException, request: web.Request) -> web.Response:
    """aiohttp's own refusals: 404, 405, 408, 413."""
    if error.status == 405:
        message = f"this path does not take {request.method}, it takes {error.headers['Allow']}"
    elif error.status == 413:
        message = f"the request body is larger than the limit of {request.app[CONFIG].max_body_bytes} bytes"
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
    response.headers["Access-Control-Allow-Origin"] = request.app[CONFIG].cors_allow_origin


async def _close_backend(app: web.Application) -> None:
    await app[BACKEND].close()
