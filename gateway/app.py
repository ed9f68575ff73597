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
from typing import Any

from aiohttp import web

from engine import wire
from engine.errors import EngineUnavailable
from engine.settings.config import Config
from engine.settings.served import ServedModel
from gateway import answers, facts, half_closed, keys, questions, stored
from gateway.answers import CALL, REQUEST_TIMEOUT
from gateway.backend import Backend
from gateway.body import parse_body, read_payload
from gateway.choices import most_at_once, side_by_side
from gateway.document import as_document
from gateway.headers import add_headers
from gateway.heads import peer_of
from gateway.health import ANSWER_WITHIN_S, readiness
from gateway.http_refusals import http_refusal
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
    TRITON_TEXT,
    name_adapter,
    num_labels,
    served_name,
)
from gateway.protocol import Call, ClientProtocol, Exchange
from gateway.request_id import UniqueIds, given_id, request_id_of, take_answer_id
from gateway.spans import begin_tracing, traced
from gateway.triton import PREFIX, ROOTS
from gateway.triton import facts as triton
from gateway.web import is_for_people

log = logging.getLogger(__name__)

WITH_NATIVE_FIELDS: Sequence[ClientProtocol] = (NATIVE, TRITON_TEXT, TRITON)
PROTOCOLS: Sequence[ClientProtocol] = (  # of a path, the first that speaks a body has it
    *(NATIVE, OPENAI, RESPONSES, ANTHROPIC, EMBEDDINGS, *RANKINGS, TRITON_TEXT, TRITON),
)

REQUEST_TIMEOUT_S = 300.0  # without a new answer of the model, unless a request says otherwise

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
    app.on_response_prepare.append(add_headers)
    app.on_cleanup.append(_close_backend)
    paths = dict.fromkeys(path for protocol in PROTOCOLS for path in protocol.paths)
    app.add_routes(
        [
            *[web.post(path, complete) for path in paths],  # first, as a reader of the document wants to see them
            *[web.post(path, ask) for path, ask in questions.ROUTES.items()],
            *stored.ROUTES,
            *[web.post(f"{root}/infer", triton.refuse_infer) for root in ROOTS],
            *[web.get(path, show) for path, show in {**facts.ROUTES, **triton.ROUTES}.items()],
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
            body = _read(payload, call)
        call.previous = await stored.previous_of(request, body)
        async with app[INTAKE].reading(len(payload)):
            call.exchange = exchange = _parse(body, call)
        del payload, body
        timeout_s = exchange.timeout_s or app[REQUEST_TIMEOUT]
        bodies = [wire.with_owner(each, call.owner) for each in exchange.requests]
        if call.traceparent:
            bodies = [{**each, "traceparent": call.traceparent} for each in bodies]
        model = UniqueIds(app[BACKEND], call, exchange)
        if bodies[0].get(wire.STORE, {}).get("is_background") and not exchange.stream:
            return await stored.begin_in_background(request, model, bodies[0])
        asks = [partial(model.generate, index, each, timeout_s) for index, each in enumerate(bodies)]
        running = side_by_side(asks, most_at_once(app[CONFIG]), timeout_s)
        if room.num_bytes:
            running = _giving_back(room, running)
        if exchange.stream:
            return await answers.stream(request, exchange, running)
        return await answers.gather(request, exchange, running)
    finally:
        room.give_back()


def _read(payload: bytes, call: Call) -> dict[str, Any]:
    """Return the body, whose protocol is known then."""
    body = parse_body(payload)
    call.protocols = [next(each for each in call.protocols if len(call.protocols) == 1 or each.speaks(body))]
    return body


def _parse(body: dict[str, Any], call: Call) -> Exchange:
    [protocol] = call.protocols
    call.given_id = given_id(call)
    if call.given_id and protocol not in WITH_NATIVE_FIELDS:
        body["request_id"] = call.given_id
    exchange = protocol.parse(body, call)
    take_answer_id(call, exchange)
    if protocol not in WITH_NATIVE_FIELDS:
        name_adapter(call, exchange, body.get("model"))
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
    """Counts the request as running, and logs its end in one line with no words of the client's but its id."""
    protocols, headers = _protocols_of(request.path), request.headers
    call = request[CALL] = Call(request.path, served_name(request.app), protocols, headers, config=request.app[CONFIG])
    call.request_id = request_id_of(call)
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
            "%s %s %s %.3fs %s%s %d tokens id=%s",
            request.method if request.method in ("GET", "POST", "HEAD", "OPTIONS") else "OTHER",
            resource.canonical if resource else "-",
            status,
            time.monotonic() - start,
            call.protocols[0].name if len(call.protocols) == 1 else "-",
            f" {call.owner.name}" if call.owner.name else "",
            call.exchange.num_tokens if call.exchange else 0,
            call.request_id,
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
        return http_refusal(error, request)
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


async def _close_backend(app: web.Application) -> None:
    await app[BACKEND].close()
