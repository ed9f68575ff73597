"""Interface between the gateway and the model. It is independent of HTTP and gRPC."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from engine.errors import EngineUnavailable
from engine.wire import (
    Aborted,
    Delta,
    DetokenizeResponse,
    LoraList,
    ModelState,
    Owner,
    StoredResponse,
    TokenizeResponse,
)

if sys.version_info >= (3, 11):
    from asyncio import timeout as timeout
else:  # aiohttp needs this package before Python 3.11
    from async_timeout import timeout as timeout


RESTART_WITHIN_S = 30.0  # how long requests wait for a model server that is restarting


class ModelUnreachable(EngineUnavailable):
    """The model server could not be reached to accept a request."""

    was_seen_recently = False  # True if it answered within RESTART_WITHIN_S: it is probably restarting


class ModelLost(ModelUnreachable):
    """The model server accepted the request and then broke off: its process or the connection died."""


class HandedOver(EngineUnavailable):
    """The server is being stopped, and another one can continue the answer."""


class Backend(Protocol):
    """Interface of the model. The gateway uses Triton; tests use a script of answers."""

    def generate(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[Delta, None]:
        """Yield the answers to one request; the last one is a Final.

        Failures are raised as RequestError.

        Raise TimedOut if no answer arrives within `timeout_s` seconds, ModelUnreachable or ModelLost if the model
        server is gone. Closing the generator cancels the request.
        """
        ...

    async def probe(self, with_metrics: bool = False) -> ModelState:
        """Return the state of the model. Raise RequestError if it is unreachable."""
        ...

    async def abort(self, req_id: str, owner: Owner) -> Aborted:
        """End an open request of this owner, regardless of the connection that sent it. Raise RequestError as above."""
        ...

    async def tokenize_or_detokenize(self, body: dict[str, Any]) -> TokenizeResponse | DetokenizeResponse:
        """Tokenize or detokenize: `body` has the field TOKENIZE or DETOKENIZE. Raise RequestError as above."""
        ...

    async def change_loras(self, body: dict[str, Any], owner: Owner) -> LoraList:
        """Load or unload an adapter: `body` has the field LOAD_LORA or UNLOAD_LORA. Raise RequestError as above."""
        ...

    async def stored_response(self, body: dict[str, Any]) -> StoredResponse:
        """Return a stored response.

        `body` has the field STORED, or STORE with a background request. Raise RequestError.
        """
        ...

    async def is_live(self) -> bool:
        """Return True if the model server accepts requests."""
        ...

    async def close(self) -> None:
        """End every running `generate` with EngineUnavailable."""
        ...
