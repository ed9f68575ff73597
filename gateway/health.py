"""Health checks: live (the server accepts requests), ready (the model answers) and started (it has answered once).

`python -m gateway.health` serves them on the health port.

/v2/health/live asks tritonserver and connects to the gRPC port and, if there is one, the HTTP port. /v2/health/ready
sends a probe through the model, so that a dead process behind an open port is noticed. Both answer 200 with an empty
body, or 503 with `{"error_code", "error_msg"}`. The codes are 1 not reachable, 2 not ready, 3 silent. The process also
serves the port of Triton's metrics (metrics_proxy.py).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from aiohttp import web
from aiohttp.log import server_logger

from engine.address import connect_host
from engine.errors import ConfigError, RequestError
from engine.log import configure
from engine.settings.config import Config
from engine.settings.disaggregation import SCHEDULER
from engine.wire import ModelState
from gateway import half_closed
from gateway.backend import Backend, timeout
from gateway.connection_limits import BACKLOG, ConnectionLimiter, allow_connections
from gateway.watchdog import end_when_hung

NOT_REACHABLE, NOT_READY, SILENT = 1, 2, 3
ANSWER_WITHIN_S = 3.0  # after that the model counts as silent
# A connection is closed after this time without a complete request, also if headers keep arriving. It exceeds the
# minute for which proxies keep connections, so that proxies are the ones to close them.
SILENT_CLIENT_S = 75.0
MAX_HEADER_TOTAL_BYTES = 16 << 20  # of incomplete request headers
MAX_AGE_S = 0.5  # a cached result may be this old, so that many callers cost the model one probe


@dataclass(frozen=True)
class HealthStatus:
    """Result of a health check. `error_code` is 0 if healthy."""

    error_code: int = 0
    error_msg: str = ""
    state: ModelState | None = None  # if the model answered


HealthCheck = Callable[[], Awaitable[HealthStatus]]


def now() -> float:
    """Return the time of the event loop, which a simulation sets."""
    return asyncio.get_running_loop().time()


class CachedHealthCheck:
    """Health check whose result is cached and shared by concurrent callers.

    The next check starts long before a result expires, so that frequent callers hardly ever wait, even though a busy
    model takes some tenths of a second to answer.
    """

    def __init__(self, check: HealthCheck, timeout_s: float, renewal: float = 0.2):
        self._check = check
        self._timeout_s = timeout_s
        self._renewal = renewal  # share of MAX_AGE_S after which a call begins the next check
        self._task: asyncio.Task[HealthStatus] | None = None
        self._last = HealthStatus()
        self._last_at = -math.inf

    async def __call__(self) -> HealthStatus:
        age_s = now() - self._last_at
        if age_s > self._renewal * MAX_AGE_S and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())
        if age_s <= MAX_AGE_S:
            return self._last
        assert self._task
        return await asyncio.shield(self._task)  # a caller that is cancelled does not cancel the check for the others

    async def _run(self) -> HealthStatus:
        self._last, self._last_at = await self._checked(), now()
        return self._last

    async def _checked(self) -> HealthStatus:
        try:
            async with timeout(self._timeout_s):
                return await self._check()
        except asyncio.TimeoutError:
            return HealthStatus(SILENT, f"no answer within {self._timeout_s:g} s")
        except RequestError as error:
            return HealthStatus(NOT_REACHABLE, str(error))
        except Exception as error:
            logging.getLogger(__name__).exception("a health check failed unexpectedly")
            return HealthStatus(NOT_READY, f"the check failed: {type(error).__name__}")


def readiness(backend: Backend, timeout_s: float) -> CachedHealthCheck:
    """Return a check that the model behind `backend` answers a probe within `timeout_s` seconds."""

    return CachedHealthCheck(partial(check_model, backend), timeout_s)


async def check_model(backend: Backend) -> HealthStatus:
    """Probe the model behind `backend` once. Raise RequestError if it cannot be reached."""
    state = await backend.probe()
    if state.ready:
        return HealthStatus(state=state)
    return HealthStatus(NOT_READY, state.reason or "the model is not ready", state)


def liveness(backend: Backend, timeout_s: float, ports: Sequence[tuple[str, int]]) -> CachedHealthCheck:
    """Return a check that the model server is live and that every (host, port) in `ports` accepts connections."""

    async def check() -> HealthStatus:
        if not await backend.is_live():
            return HealthStatus(NOT_REACHABLE, "the model server does not answer")
        for host, port in ports:
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError as error:
                return HealthStatus(NOT_REACHABLE, f"no answer on port {port}: {error.strerror}")
            writer.close()
        return HealthStatus()

    return CachedHealthCheck(check, timeout_s)


def as_response(health: HealthStatus) -> web.Response:
    """Return 200 with an empty body, or 503 with the error code and message."""
    if health.error_code:
        return web.json_response({"error_code": health.error_code, "error_msg": health.error_msg}, status=503)
    return web.Response()


def make_health_app(backend: Backend, timeout_s: float, ports: Sequence[tuple[str, int]] = ()) -> web.Application:
    """Return the application of the health port. The server is live only while `ports` accept connections."""
    ready, live = readiness(backend, timeout_s), liveness(backend, timeout_s, ports)
    has_started = False

    async def answer_ready(_: web.Request) -> web.Response:
        return as_response(await ready())

    async def answer_started(_: web.Request) -> web.Response:
        nonlocal has_started
        health = HealthStatus() if has_started else await ready()
        has_started |= not health.error_code
        return as_response(health)

    async def answer_live(_: web.Request) -> web.Response:
        return as_response(await live())

    async def close(_: web.Application) -> None:
        await backend.close()

    app = web.Application()
    half_closed.allow(app)
    answers = {"ready": answer_ready, "live": answer_live, "started": answer_started}
    app.add_routes([web.get(f"/v2/health/{name}", answer) for name, answer in answers.items()])
    app.on_cleanup.append(close)
    return app


async def serve(apps: Mapping[int, web.Application], host: str) -> None:
    """Serve each application on its port until SIGTERM or SIGINT."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runners, watching = [], [loop.create_task(end_when_hung())]
    for port, app in apps.items():
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1, keepalive_timeout=SILENT_CLIENT_S)
        await runner.setup()
        assert runner.server
        runners.append(runner)
        await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        watching.append(
            loop.create_task(ConnectionLimiter(runner.server, [], set(), MAX_HEADER_TOTAL_BYTES).watch([port]))
        )
    await stop.wait()
    for task in watching:
        task.cancel()
    for runner in runners:
        await runner.cleanup()


def main() -> None:
    """Run the health process."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway.health",
        description="Serve the health port. Settings are environment variables: python -m engine.settings.table",
    )
    parser.parse_args()
    config = Config.from_env()

    from gateway.http_responses import is_worth_logging
    from gateway.metrics_proxy import make_metrics_app
    from gateway.replicas.backend import ReplicatedBackend
    from gateway.replicas.replica_set import ReplicaSet
    from gateway.triton_client import TritonBackend  # imported here because app.py needs only the checks of this module
    from gateway.triton_connections import TritonConnections

    async def start_replicas(_: web.Application) -> None:
        assert replicas
        replicas.start()

    configure(config.log_level)
    server_logger.addFilter(is_worth_logging)
    host, port = config.service_host, config.health_http_port
    served = [config.service_grpc_port, *config.http_ports]
    ports = [(connect_host(host), number) for number in served]
    backend: Backend = TritonBackend(TritonConnections(config.triton_target))
    replicas = ReplicaSet(backend, config) if config.splitwise_role == SCHEDULER else None
    app = make_health_app(ReplicatedBackend(replicas) if replicas else backend, ANSWER_WITHIN_S, ports)
    if replicas:
        app.on_startup.append(start_replicas)
    allow_connections()
    asyncio.run(serve({port: app, config.metrics_http_port: make_metrics_app(config.triton_page)}, host))


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(str(error))
