"""Description of an endpoint that does not generate text: its route, and its entry in the OpenAPI document.

Endpoints that generate text belong to a protocol (protocol.py).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from gateway.protocol import ClientProtocol

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Endpoint:
    """One endpoint. The first line of the handler's docstring is its summary in the document."""

    path: str  # may have parameters: "/v1/models/{model:.+}"
    handler: Handler
    method: str = "GET"
    sample: Any = None  # an example of the JSON answer, from which its schema is derived; None: any JSON
    content_type: str = "application/json"  # media type of the answer; "": the document does not describe it
    fields: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # fields of the body as JSON Schema by name
    needs: Collection[str] = ()  # fields of which a body must have at least one
    protocol: ClientProtocol | None = None  # writes the errors; None: app.py chooses by the path

    @property
    def canonical_path(self) -> str:
        """Return the path as the document and the log have it: without the patterns of its parameters."""
        return re.sub(r":[^{}]*}", "}", self.path)

    @property
    def route(self) -> web.RouteDef:
        """Return the route for aiohttp, which adds HEAD to GET."""
        return web.route(self.method, self.path, self.handler)
