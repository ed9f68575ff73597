"""HTTP application of one worker: the routes of the service port, and the protocol of each request.

A path may belong to several protocols. In that case the first one in PROTOCOLS that recognizes the body handles the
request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from engine import wire
from engine.settings.config import Config
from engine.settings.served import ServedModel
from gateway import endpoints, half_closed, http_responses, server_info, stored_responses
from gateway.app_keys import (
    ANTHROPIC,
    BACKEND,
    BEGUN,
    BODY_MEMORY,
    CONFIG,
    DOCUMENT,
    DRAINING,
    EMBEDDINGS,
    LABELS,
    NATIVE,
    OPENAI,
    READY,
    RESPONSES,
    RUNNING,
    SCORING,
    SERVED,
    TRITON,
    TRITON_TEXT,
    VLLM_GENERATE,
    name_adapter,
    num_labels,
    served_config,
    served_name,
    served_names,
)
from gateway.backend import Backend
from gateway.body import parse_body, read_payload
from gateway.body_memory import BodyMemoryBudget, BodyMemoryReservation
from gateway.concurrent_requests import max_concurrent_requests, run_concurrently
from gateway.connection_limits import peer_of
from gateway.endpoint import Endpoint, Handler
from gateway.headers import add_headers
from gateway.health import ANSWER_WITHIN_S, readiness
from gateway.http_responses import CONTEXT, REQUEST_TIMEOUT
from gateway.middleware import CLIENT_DISCONNECTED, UNGUARDED, errors_as_json
from gateway.openai.output_syntax import output_syntax_of
from gateway.openai.sampling_defaults import add_sampling_defaults
from gateway.openapi import openapi_document
from gateway.protocol import ClientProtocol, Exchange, RequestContext
from gateway.request_id import UniqueIdBackend, given_id, request_id_of, take_answer_id
from gateway.retry import RetryingBackend
from gateway.spans import begin_tracing, traced
from gateway.triton import PREFIX
from gateway.triton import metadata as triton

log = logging.getLogger(__name__)

WITH_NATIVE_FIELDS: Sequence[ClientProtocol] = (NATIVE, TRITON_TEXT, TRITON)
WITH_MODEL_DEFAULTS: Sequence[ClientProtocol] = (OPENAI, RESPONSES, ANTHROPIC)
PROTOCOLS: Sequence[ClientProtocol] = (  # the first one that recognizes the body handles the request
    *(NATIVE, OPENAI, RESPONSES, ANTHROPIC, EMBEDDINGS, *SCORING, VLLM_GENERATE, TRITON_TEXT, TRITON),
)
ENDPOINTS: Sequence[Endpoint] = (
    *(*endpoints.ENDPOINTS, *stored_responses.ENDPOINTS, *server_info.ENDPOINTS, *triton.ENDPOINTS),
)
ERROR_PROTOCOLS = {each.path: each.protocol for each in ENDPOINTS if each.protocol}

REQUEST_TIMEOUT_S = 300.0  # longest wait for the next answer of the model; a request may set its own `timeout`


def make_app(backend: Backend, config: Config, request_timeout_s: float = REQUEST_TIMEOUT_S) -> web.Application:
    """Return the application that serves requests through `backend`.

    `request_timeout_s` is the longest time without a new answer of the model, unless a request has its own `timeout`.
    Raise ConfigError if a setting is wrong.
    """
    app = web.Application(middlewares=[log_request, errors_as_json], client_max_size=config.max_body_bytes)
    app[READY] = readiness(backend, ANSWER_WITHIN_S)
    app[SERVED] = ServedModel(config.run_path)
    app[BACKEND] = RetryingBackend(backend, app[READY], app[SERVED])
    app[CONFIG] = config
    output_syntax_of(config)  # raises ConfigError now, not at the first request, if a plug-in file is wrong
    app[REQUEST_TIMEOUT] = request_timeout_s
    app[BODY_MEMORY] = BodyMemoryBudget.for_worker(config)
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
            *[web.post(path, complete) for path in paths],  # first, because the document lists routes in this order
            *[endpoint.route for endpoint in ENDPOINTS],
        ]
    )
    document: Callable[[], dict[str, Any]] = functools.cache(
        partial(openapi_document, app, PROTOCOLS, ENDPOINTS, UNGUARDED)
    )
    app[DOCUMENT] = document
    return app


async def complete(request: web.Request) -> web.StreamResponse:
    """Generate an answer of the model, in the protocol of the request."""
    context, app = request[CONTEXT], request.app
    reservation = BodyMemoryReservation(app[BODY_MEMORY])
    try:
        payload = await read_payload(request, app[CONFIG].max_body_bytes, reservation)
        if context.protocols[0] in SCORING:
            context.num_labels = await num_labels(app)
        async with app[BODY_MEMORY].reading(len(payload)):
            body = _read(payload, context)
        context.previous = await stored_responses.previous_of(request, body)
        async with app[BODY_MEMORY].reading(len(payload)):
            context.exchange = exchange = _parse(body, context)
        del payload, body
        timeout_s = exchange.timeout_s or app[REQUEST_TIMEOUT]
        bodies = [wire.with_owner(each, context.owner) for each in exchange.requests]
        if context.traceparent:
            bodies = [{**each, "traceparent": context.traceparent} for each in bodies]
        model = UniqueIdBackend(app[BACKEND], context, exchange)
        if bodies[0].get(wire.STORE, {}).get("is_background") and not exchange.stream:
            return await stored_responses.begin_in_background(request, model, bodies[0])
        generators = [partial(model.generate, index, each, timeout_s) for index, each in enumerate(bodies)]
        running = run_concurrently(generators, max_concurrent_requests(app[CONFIG]), timeout_s)
        if reservation.num_bytes:
            running = _release_at_first_answer(reservation, running)
        if exchange.stream:
            return await http_responses.stream(request, exchange, running)
        return await http_responses.gather(request, exchange, running)
    finally:
        reservation.release()


def _read(payload: bytes, context: RequestContext) -> dict[str, Any]:
    """Return the JSON body and set the protocol of the request, which is known from then on."""
    body = parse_body(payload)
    context.protocols = [next(each for each in context.protocols if len(context.protocols) == 1 or each.speaks(body))]
    return body


def _parse(body: dict[str, Any], context: RequestContext) -> Exchange:
    [protocol] = context.protocols
    context.given_id = given_id(context)
    if context.given_id and protocol not in WITH_NATIVE_FIELDS:
        body["request_id"] = context.given_id
    if protocol in WITH_MODEL_DEFAULTS:
        add_sampling_defaults(body, context.config)
    if body.get("model") in context.other_names:
        body["model"] = context.model_name
    exchange = protocol.parse(body, context)
    take_answer_id(context, exchange)
    if protocol not in WITH_NATIVE_FIELDS:
        name_adapter(context, exchange, body.get("model"))
    return exchange


async def _release_at_first_answer(
    reservation: BodyMemoryReservation, running: http_responses.Answers
) -> http_responses.Answers:
    """Yield the answers of `running` and release the reserved memory when the first one arrives."""
    async with contextlib.aclosing(running):
        async for each in running:
            reservation.release()
            yield each


def _protocols_of(path: str) -> Sequence[ClientProtocol]:
    """Return the protocols that a request to `path` may use.

    On other paths the protocol decides only the form of errors.
    """
    if speaking := [each for each in PROTOCOLS if path in each.paths]:
        return speaking
    if protocol := ERROR_PROTOCOLS.get(path):
        return [protocol]
    if path.startswith("/v1/messages/"):  # such as batches, which are not served
        return [ANTHROPIC]
    return [TRITON] if f"{path}/".startswith(PREFIX) else [NATIVE, OPENAI]


# --- around every request ---------------------------------------------------------------------------------------


@web.middleware
async def log_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count the request as running, and log its end in one line that contains no text of the client except the request
    id.
    """
    protocols, headers = _protocols_of(request.path), request.headers
    context = request[CONTEXT] = RequestContext(
        request.path, served_name(request.app), protocols, headers, config=served_config(request.app)
    )
    context.other_names = served_names(request.app)[1:]
    context.request_id = request_id_of(context)
    running = request.app[RUNNING]
    running.append(request)
    if peer := peer_of(request.transport):
        request.app[BEGUN].add(peer)
    start, status = time.monotonic(), CLIENT_DISCONNECTED
    try:
        with traced(request, context) as ended:
            ended["status"] = status
            response = await handler(request)
            status = ended["status"] = context.late_status or response.status
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
            context.protocols[0].name if len(context.protocols) == 1 else "-",
            f" {context.owner.name}" if context.owner.name else "",
            context.exchange.num_tokens if context.exchange else 0,
            context.request_id,
        )


async def _close_backend(app: web.Application) -> None:
    await app[BACKEND].close()
