"""Middleware of the service port: authentication, and errors in the form of the request's protocol."""

from __future__ import annotations

from aiohttp import web

from engine.errors import EngineUnavailable
from gateway import api_keys, http_responses
from gateway.app_keys import CONFIG, DRAINING, OPENAI
from gateway.endpoint import Handler
from gateway.http_errors import http_refusal
from gateway.http_responses import CONTEXT
from gateway.web import is_for_browser

# Paths without an API key: browsers send none, and these reveal nothing about the model.
UNGUARDED = (
    *("/health", "/ping", "/version", "/openapi.json", "/docs", "/page/{file}"),
    *("/v2/health/live", "/v2/health/ready"),
)
CLIENT_DISCONNECTED = 499  # used in the log only


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Check the API key and convert exceptions into error responses of the request's protocol."""
    if request.method == "OPTIONS":  # CORS preflight
        return web.Response(status=204)
    try:
        _check_key(request)
        if request.app[DRAINING].is_set():
            raise EngineUnavailable("the server is stopping")
        return await handler(request)
    except web.HTTPException as error:
        return http_refusal(error, request)
    except ConnectionError:  # the client has disconnected or does not read
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=CLIENT_DISCONNECTED)
    except Exception as error:
        return http_responses.refusal(http_responses.as_known(error), request)


def _check_key(request: web.Request) -> None:
    owners, context, resource = request.app[CONFIG].owners, request[CONTEXT], request.match_info.route.resource
    is_open = is_for_browser(request) or (resource is not None and resource.canonical in UNGUARDED)
    if owners and not is_open:
        try:
            bare = request.headers.get("x-api-key")  # header of Anthropic's clients
            given = request.headers.get("Authorization", f"Bearer {bare}" if bare else "")
            context.owner = api_keys.authenticate(given, owners)
        except api_keys.InvalidApiKey:
            context.protocols = [OPENAI] if OPENAI in context.protocols else context.protocols
            raise
