"""Endpoints of Triton's HTTP protocol that do not generate text: health, metadata, and the refusal of infer.

Triton's own configuration and statistics are available over gRPC only.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from engine import __version__
from engine.wire.triton import DATATYPE, INPUT, MODEL, OUTPUT, VERSION
from gateway.app_keys import BACKEND, READY
from gateway.endpoint import Endpoint
from gateway.health import NOT_REACHABLE, HealthStatus, as_response
from gateway.http_responses import json_response
from gateway.triton import ROOT, ROOTS

SERVER = {"name": "triton", "version": __version__, "extensions": ["generate"]}
METADATA = {
    "name": MODEL,
    "versions": [VERSION],
    "platform": "python",
    "inputs": [{"name": INPUT, "datatype": DATATYPE, "shape": [1]}],
    "outputs": [{"name": OUTPUT, "datatype": DATATYPE, "shape": [1]}],
}


async def show_live(request: web.Request) -> web.Response:
    """Report whether the server takes requests, in Triton's form."""
    is_live = await request.app[BACKEND].is_live()
    return as_response(HealthStatus() if is_live else HealthStatus(NOT_REACHABLE, "the model server does not answer"))


async def show_ready(request: web.Request) -> web.Response:
    """Report whether the model answers, in Triton's form."""
    return as_response(await request.app[READY]())


async def show_server(_: web.Request) -> web.Response:
    """Return the server's metadata in Triton's form."""
    return json_response(SERVER)


async def show_model_ready(request: web.Request) -> web.Response:
    """Report whether this model answers, in Triton's form."""
    _check_model(request)
    return as_response(await request.app[READY]())


async def show_model(request: web.Request) -> web.Response:
    """Return the model's input and output as Triton's metadata."""
    _check_model(request)
    return json_response(METADATA)


async def refuse_infer(_: web.Request) -> web.Response:
    """Refuse infer as Triton does, because the model is decoupled; generate and generate_stream serve it."""
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


def _of_model(root: str) -> tuple[Endpoint, Endpoint]:
    return Endpoint(root, show_model, sample=METADATA), Endpoint(f"{root}/ready", show_model_ready, content_type="")


ENDPOINTS: Sequence[Endpoint] = (
    *(Endpoint(f"{root}/infer", refuse_infer, "POST", content_type="") for root in ROOTS),
    Endpoint("/v2", show_server, sample=SERVER),
    Endpoint("/v2/health/live", show_live, content_type=""),
    Endpoint("/v2/health/ready", show_ready, content_type=""),
    *_of_model("/v2/models/{model}"),
    *_of_model("/v2/models/{model}/versions/{version}"),
)
