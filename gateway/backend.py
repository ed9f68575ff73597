"""What the gateway needs of the model, and the settings of a worker. Knows nothing of HTTP or gRPC."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

if sys.version_info >= (3, 11):
    from asyncio import timeout as timeout
else:  # aiohttp needs this package before Python 3.11
    from async_timeout import timeout as timeout

Answer = dict[str, Any]  # one response of the model, as engine/wire/request.py describes it


class Backend(Protocol):
    """The model as one client: Triton for real, a script in tests."""

    def generate(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[Answer, None]:
        """The answers to one request. The last one has `is_end` 1; a failure is raised as a RequestError.

        TimedOut when no answer comes for `timeout_s`. Closing the generator cancels the request.
        """
        ...

    async def probe(self) -> dict[str, Any]:
        """The model's state: `ready`, `reason`, facts such as `model_len`. Raises a RequestError when unreachable."""
        ...

    async def is_live(self) -> bool:
        """Whether the server in front of the model takes requests."""
        ...

    async def close(self) -> None:
        """Ends every running `generate` with EngineUnavailable."""
        ...


@dataclass(frozen=True)
class GatewaySettings:
    """One worker's settings, see `python -m gateway --help`."""

    model_name: str = "default"  # the name in /v1/models; requests may use any
    max_body_bytes: int = 4 << 20
    api_key: str = field(default="", repr=False)  # empty: anybody may ask
    cors_allow_origin: str = "*"  # empty: no CORS headers
    drain_timeout_s: float = 30.0  # how long running requests may go on after SIGTERM
    request_timeout_s: float = 300.0  # without a new response, unless the request says otherwise
    probe_timeout_s: float = 3.0
