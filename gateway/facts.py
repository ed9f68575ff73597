"""The routes that tell what there is: endpoints, health, metrics, models."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from gateway import answers, metrics
from gateway.answers import CALL
from gateway.health import as_response
from gateway.parts import BACKEND, OPENAI, READY, served_name

STARTED = int(time.time())


async def show_endpoints(request: web.Request) -> web.Response:
    paths = {route.resource.canonical for route in request.app.router.routes() if route.resource is not None}
    return answers.in_one_piece({"model": served_name(request.app), "endpoints": sorted(paths)})


async def show_health(request: web.Request) -> web.Response:
    return as_response(await request.app[READY]())


async def show_metrics(request: web.Request) -> web.Response:
    state = await request.app[BACKEND].probe(with_metrics=True)
    text = metrics.as_text(state.metrics or ())
    return web.Response(text=text, headers={"Content-Type": metrics.CONTENT_TYPE})


async def list_models(request: web.Request) -> web.Response:
    return answers.in_one_piece({"object": "list", "data": [await _model(request.app)]})


async def show_model(request: web.Request) -> web.Response:
    request[CALL].protocols = [OPENAI]
    model = await _model(request.app)
    if request.match_info["model"] != model["id"]:
        raise web.HTTPNotFound(text=f"the served model is `{model['id']}`")
    return answers.in_one_piece(model)


async def _model(app: web.Application) -> dict[str, Any]:
    name = served_name(app)
    state = (await app[READY]()).state
    model = {"id": name, "object": "model", "created": STARTED, "owned_by": "paddle", "root": name}
    return {**model, "max_model_len": state.model_len if state else None}
