"""Error responses for aiohttp's own exceptions (404, 405, 408, 413) in the form of the request's protocol."""

from __future__ import annotations

import difflib

from aiohttp import web

from engine.errors import InvalidRequest, RequestError
from engine.settings.foreign.endpoints import instead_of
from gateway import http_responses

MAX_PATH_LEN, IS_CLOSE = 100, 0.75  # limits of the search for a similar path: its length, and the similarity


def http_refusal(error: web.HTTPException, request: web.Request) -> web.Response:
    """Return the error response for `error`, with a hint such as the allowed method or a similar path."""
    if error.status == 405:
        allowed = error.headers["Allow"].replace(",", ", ")
        message = f"this path does not take {request.method}, it takes {allowed}"
    elif request.match_info.route.resource is None:
        message = _no_such_path(request)
    else:
        message = error.text or error.reason
    known = (InvalidRequest if error.status < 500 else RequestError)(message)
    known.code = error.status
    response = http_responses.refusal(known, request)
    if error.status == 408:
        response.force_close()  # the rest of the body must not be read as the next request
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _no_such_path(request: web.Request) -> str:
    """Name the path that was probably meant, such as `/v1/chat/completions` for a base URL without `/v1`, or what there
    is instead of another server's endpoint."""
    if len(request.path) <= MAX_PATH_LEN and (other := instead_of(request.path.rstrip("/"))):
        path, server, instead = other
        return f"{path} of {server} is not served: {instead}"
    paths = {route.resource.canonical for route in request.app.router.routes() if route.resource is not None}
    close = difflib.get_close_matches(request.path, paths, 1, IS_CLOSE) if len(request.path) <= MAX_PATH_LEN else []
    return f"no such path, {f'did you mean {close[0]}?' if close else 'see GET / for what there is'}"
