"""What the gateway needs of the model. Knows nothing of HTTP or gRPC."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from engine.errors import EngineUnavailable
from engine.wire import Aborted, Delta, Detokenized, Loras, ModelState, Owner, StoredResponse, Tokenized

if sys.version_info >= (3, 11):
    from asyncio import timeout as timeout
else:  # aiohttp needs this package before Python 3.11
    from async_timeout import timeout as timeout


COMING_BACK_S = 30.0  # as long a model server may be gone before nobody waits for it


class ModelUnreachable(EngineUnavailable):
    """The model server was not there to take a request."""

    was_there = False  # within COMING_BACK_S: it is being started again


class ModelLost(ModelUnreachable):
    """It had taken the request, and broke off: it has died, or the connection to it."""


class Backend(Protocol):
    """The model as one client: Triton for real, a script in tests."""

    def generate(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[Delta, None]:
        """The answers to one request, the last one a Final; a failure is raised as a RequestError.

        TimedOut when no answer comes for `timeout_s`, ModelUnreachable and ModelLost when none will. Closing the
        generator cancels the request.
        """
        ...

    async def probe(self, with_metrics: bool = False) -> ModelState:
        """Raises a RequestError when the model is unreachable."""
        ...

    async def abort(self, req_id: str, owner: Owner) -> Aborted:
        """Ends an open request of this owner, whoever has sent it. Raises a RequestError as above."""
        ...

    async def about_tokens(self, question: dict[str, Any]) -> Tokenized | Detokenized:
        """`question` has the key TOKENIZE or DETOKENIZE. Raises a RequestError."""
        ...

    async def change_loras(self, question: dict[str, Any], owner: Owner) -> Loras:
        """`question` has the key LOAD_LORA or UNLOAD_LORA. Raises a RequestError."""
        ...

    async def stored_response(self, body: dict[str, Any]) -> StoredResponse:
        """`body` has the key STORED, or STORE with a request in the background. Raises a RequestError as above."""
        ...

    async def is_live(self) -> bool:
        """Whether the server in front of the model takes requests."""
        ...

    async def close(self) -> None:
        """Ends every running `generate` with EngineUnavailable."""
        ...
