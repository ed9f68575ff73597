"""What clients of Triton's HTTP protocol ask before they ask the model. Configuration and statistics are Triton's own,
and told over gRPC only. SAMPLES shows to the document what is told."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from engine import __version__
from engine.wire.triton import DATATYPE, INPUT, MODEL, OUTPUT, VERSION
from gateway.app_keys import BACKEND, READY
from gateway.health import NOT_REACHABLE, HealthStatus, as_response
from gateway.http_responses import json_response
from gateway.triton import ROOT

SERVER = {"name": "triton", "version": __version__, "extensions": ["generate"]}
METADATA = {
    "name": MODEL,
    "versions": [VERSION],
    "platform": "python",
    "inputs": [{"name": INPUT, "datatype": DATATYPE, "shape": [1]}],
    "outputs": [{"name": OUTPUT, "datatype": DATATYPE, "shape": [1]}],
}


async def show_live(request: web.Request) -> web.Response:
    """Whether the server takes requests, as Triton tells it."""
    is_live = await request.app[BACKEND].is_live()
    return as_response(HealthStatus() if is_live else HealthStatus(NOT_REACHABLE, "the model server does not answer"))


async def show_ready(request: web.Request) -> web.Response:
    """Whether the model answers, as Triton tells it."""
    return as_response(await request.app[READY]())


async def show_server(_: web.Request) -> web.Response:
    """The server as Triton's metadata."""
    return json_response(SERVER)


async def show_model_ready(request: web.Request) -> web.Response:
    """Whether this model answers, as Triton tells it."""
    _check_model(request)
    return as_response(await request.app[READY]())


async def show_model(request: web.Request) -> web.Response:
    """The model's input and output as Triton's metadata."""
    _check_model(request)
    return json_response(METADATA)


async def refuse_infer(_: web.Request) -> web.Response:
    """Refused as Triton does: the model answers with a stream, which generate and generate_stream can tell."""
    raise web.HTTPBadRequest(
        text=f"infer doesn't support models with decoupled transaction policy; POST {ROOT}/generate or generate_stream"
    )


def _check_model(request: web.Request) -> None:
    if (name := request.match_info["model"]) != MODEL:
        raise web.HTTPNotFound(text=f"Request for unknown model: '{name[:100]}' is not found")
    if (version := request.match_info.get("version", VERSION)) != VERSION:
        raise web.HTTPNotFound(
            text=f"Request for unknown model: '{MODEL}' has no version {version[:100]}, it is {VERSION}"
        )


ROUTES = {
    "/v2": show_server,
    "/v2/health/live": show_live,
    "/v2/health/ready": show_ready,
    "/v2/models/{model}": show_model,
    "/v2/models/{model}/ready": show_model_ready,
    "/v2/models/{model}/versions/{version}": show_model,
    "/v2/models/{model}/versions/{version}/ready": show_model_ready,
}
SAMPLES: dict[str, Any] = {
    "/v2": SERVER,
    "/v2/models/{model}": METADATA,
    "/v2/models/{model}/versions/{version}": METADATA,
}
