"""GET endpoints that describe the server: health, load, metrics, status, version, models and the OpenAPI document."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from engine import __version__
from engine.errors import UnknownModel, escape_braces
from engine.settings.served import OWN_NAME
from engine.wire import ModelState, shown
from gateway import metrics
from gateway.app_keys import BACKEND, CONFIG, DOCUMENT, OPENAI, READY, served_name, served_names
from gateway.endpoint import Endpoint
from gateway.health import as_response
from gateway.http_responses import CONTEXT, REQUEST_TIMEOUT, json_response
from gateway.openai import BASE
from gateway.openapi_html import openapi_html
from gateway.web import is_for_browser, page, show_file

STARTED = int(time.time())
VERSION = {"version": __version__}


async def show_root(request: web.Request) -> web.Response:
    """Return the web page to browsers, and the model's name and the list of paths to programs."""
    if is_for_browser(request):
        return page(request)
    paths = {route.resource.canonical for route in request.app.router.routes() if route.resource is not None}
    return json_response(_endpoints(served_name(request.app), paths))


async def show_health(request: web.Request) -> web.Response:
    """Report whether the model answers."""
    return as_response(await request.app[READY]())


async def show_load(request: web.Request) -> web.Response:
    """Return the number of open requests, in vLLM's form."""
    return json_response(_load(await request.app[BACKEND].probe()))


async def show_metrics(request: web.Request) -> web.Response:
    """Return the Prometheus metrics of this server."""
    state = await request.app[BACKEND].probe(with_metrics=True)
    text = metrics.as_text(state.metrics or ())
    return web.Response(text=text, headers={"Content-Type": metrics.CONTENT_TYPE})


async def show_status(request: web.Request) -> web.Response:
    """Return the state of the server, its metrics, and the last requests without their text."""
    return json_response(_status(served_name(request.app), await request.app[BACKEND].probe(with_metrics=True)))


async def show_version(_: web.Request) -> web.Response:
    """Return the server's version."""
    return json_response(VERSION)


async def show_document(request: web.Request) -> web.Response:
    """Return this OpenAPI document."""
    return json_response(request.app[DOCUMENT]())


async def show_page(request: web.Request) -> web.Response:
    """Return the OpenAPI document as an HTML page."""
    headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
    return web.Response(text=openapi_html(request.app[DOCUMENT]()), content_type="text/html", headers=headers)


async def list_models(request: web.Request) -> web.Response:
    """List the served model and its adapters."""
    return json_response({"object": "list", "data": await _models(request.app)})


async def show_model(request: web.Request) -> web.Response:
    """Return the served model or the adapter of this name."""
    request[CONTEXT].protocols = [OPENAI]
    models = {model["id"]: model for model in await _models(request.app)}
    name = request.match_info["model"]
    own = served_name(request.app) if name == OWN_NAME else name
    if (model := models.get(own)) is None:
        names = escape_braces(", ".join(f"`{each}`" for each in models))
        text = f"the served model{'s are' if len(models) > 1 else ' is'} {names}; there is no model {{value}}"
        raise UnknownModel(text, field="model", value=shown(name))
    return json_response(model)


async def _models(app: web.Application) -> list[dict[str, Any]]:
    """Return the model by each of its names, and its adapters.

    Adapters are queried now, so that one just loaded is listed; the rest is as old as the cached readiness.
    """
    loras = await app[BACKEND].lora_names(app[REQUEST_TIMEOUT]) if app[CONFIG].has_loras else ()
    names, state = served_names(app), (await app[READY]()).state
    model = _model_fields(names[0], state)
    others = [{**model, "id": name} for name in names[1:]]
    return [model, *others, *({**model, "id": lora, "root": lora, "parent": names[0]} for lora in loras)]


def _model_fields(name: str, state: ModelState | None) -> dict[str, Any]:
    model = {"id": name, "object": "model", "created": STARTED, "owned_by": "paddle", "root": name, "parent": None}
    modalities = {"input_modalities": _modalities(state), "output_modalities": ["text"]}
    return {**model, "max_model_len": state.model_len if state else None, **modalities}


def _modalities(state: ModelState | None) -> list[str]:
    return ["text", "image"] if state and state.reads_images else ["text"]


def _status(name: str, state: ModelState) -> dict[str, Any]:
    fields = {"model": name, "ready": state.ready, "reason": state.reason, "model_len": state.model_len}
    fields["input_modalities"] = _modalities(state)
    numbers = {family + suffix: value for family, _, _, labels, value, suffix in state.metrics or () if not labels}
    return {**fields, "metrics": numbers, "last_requests": state.last_requests or []}


def _load(state: ModelState) -> dict[str, int]:
    return {"server_load": state.num_open}


def _endpoints(name: str, paths: set[str]) -> dict[str, Any]:
    return {"model": name, "endpoints": sorted(paths)}


MODEL_SAMPLE = _model_fields("default", None)
ENDPOINTS: Sequence[Endpoint] = (
    Endpoint("/", show_root, sample=_endpoints("default", {"/"})),
    Endpoint("/page/{file}", show_file, content_type="*/*"),
    *(Endpoint(path, show_health, content_type="") for path in ("/health", "/ping")),
    Endpoint("/ping", show_health, "POST", content_type=""),  # as FastDeploy and vLLM have it
    Endpoint("/load", show_load, sample=_load(ModelState(ready=True))),
    Endpoint("/metrics", show_metrics, content_type=metrics.CONTENT_TYPE.partition(";")[0]),
    Endpoint("/status", show_status, sample=_status("default", ModelState(ready=True))),
    Endpoint("/version", show_version, sample=VERSION),
    Endpoint("/openapi.json", show_document, sample={}),
    Endpoint("/docs", show_page, content_type="text/html"),
    *(
        Endpoint(f"{prefix}/models", list_models, sample={"object": "list", "data": [MODEL_SAMPLE]})
        for prefix in ("/v1", BASE)
    ),
    *(Endpoint(f"{prefix}/models/{{model:.+}}", show_model, sample=MODEL_SAMPLE) for prefix in ("/v1", BASE)),
)
