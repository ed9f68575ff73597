"""Gateway worker process.

It shares the HTTP and gRPC ports with the other workers (SO_REUSEPORT).

On SIGTERM or SIGINT it stops listening, lets running requests finish within the drain timeout, ends the others with an
error event, and exits with status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Sequence

import grpc
from aiohttp import web
from aiohttp.log import server_logger

from engine.address import in_url
from engine.errors import ConfigError
from engine.garbage import OF_REQUESTS, collect_garbage_seldom
from engine.log import configure
from engine.settings.config import Config
from engine.settings.tls import key_and_chain, server_context
from gateway.app import make_app
from gateway.app_keys import BACKEND, BEGUN, BODY_MEMORY, DRAINING, RUNNING
from gateway.backend import Backend, timeout
from gateway.connection_limits import BACKLOG, MAX_HEADER_BYTES, MAX_HEADERS, ConnectionLimiter, allow_connections
from gateway.grpc_server.server import GrpcServer
from gateway.health import SILENT_CLIENT_S
from gateway.http_responses import is_worth_logging
from gateway.replicas.backend import ReplicatedBackend
from gateway.replicas.replica_set import ReplicaSet
from gateway.triton_client import TritonBackend
from gateway.triton_connections import TritonConnections
from gateway.watchdog import end_when_hung

log = logging.getLogger("gateway")

ERROR_EVENTS_S = 2.0  # to send the error events after the drain timeout


async def serve(
    app: web.Application,
    socks: Sequence[socket.socket],
    stop: asyncio.Event,
    drain_timeout_s: float,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve HTTP on `socks` until `stop` is set, then drain for at most `drain_timeout_s` seconds."""
    server_logger.addFilter(is_worth_logging)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=ERROR_EVENTS_S,
        auto_decompress=False,
        keepalive_timeout=SILENT_CLIENT_S,
        max_headers=MAX_HEADERS,
        max_field_size=MAX_HEADER_BYTES,
        max_line_size=MAX_HEADER_BYTES,
    )
    await runner.setup()
    sites = [web.SockSite(runner, sock, backlog=BACKLOG, ssl_context=tls) for sock in socks]
    for site, sock in zip(sites, socks, strict=True):
        await site.start()
        log.info("listening on %s:%d", *sock.getsockname()[:2])
    assert runner.server
    heads = ConnectionLimiter(runner.server, app[RUNNING], app[BEGUN], app[BODY_MEMORY].max_bytes)
    watching = asyncio.create_task(heads.watch([sock.getsockname()[1] for sock in socks]))
    await stop.wait()
    watching.cancel()
    for sock in socks:
        asyncio.get_running_loop().remove_reader(sock)
    # A closing asyncio server drops connections that are accepted but not started: let them start.
    await asyncio.sleep(0)
    for site in sites:
        await site.stop()
    await drain(app, drain_timeout_s)
    await runner.cleanup()  # closes idle connections and cancels writes that block on a client
    log.info("stopped")


async def drain(app: web.Application, timeout_s: float) -> None:
    """Refuse new requests on open connections and wait until the running ones have finished.

    After `timeout_s` seconds the remaining requests are ended with an error.
    """
    app[DRAINING].set()
    log.info("draining, %d running, at most %g s", len(app[RUNNING]), timeout_s)
    try:
        async with timeout(timeout_s):
            while app[RUNNING]:
                await asyncio.sleep(0.01)
    except asyncio.TimeoutError:
        log.warning("drain timeout, ending %d running requests", len(app[RUNNING]))
    await app[BACKEND].close()


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket bound to `host` and `port`, which other workers may bind as well.

    Raise OSError if that is impossible.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((host, port))
    return sock


async def run(config: Config) -> None:
    """Run the HTTP and gRPC servers of this worker until SIGTERM or SIGINT."""
    backend: Backend = TritonBackend(TritonConnections(config.triton_target))
    replicas = ReplicaSet(backend, config) if config.replica_addresses else None
    if replicas:
        backend = ReplicatedBackend(replicas)
    # Before the ports are opened, because a wrong setting is found here
    app = make_app(backend, config) if config.http_ports else None
    if replicas:
        replicas.start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    watching = asyncio.create_task(end_when_hung())
    await asyncio.gather(serve_grpc(config, stop, replicas), *[serve_http(app, config, stop)] if app else [])
    watching.cancel()


async def serve_http(app: web.Application, config: Config, stop: asyncio.Event) -> None:
    """Listen on the configured HTTP ports and serve `app` until `stop` is set."""
    socks = [listen(config.service_host, number) for number in config.http_ports]
    await serve(app, socks, stop, config.drain_timeout_s, server_context(config))


async def serve_grpc(config: Config, stop: asyncio.Event, replicas: ReplicaSet | None = None) -> None:
    """Serve gRPC until `stop` is set, then drain. Raise OSError if the port cannot be used."""
    server = GrpcServer(TritonConnections(config.triton_target), config, replicas)
    credentials = grpc.ssl_server_credentials([key_and_chain(config)]) if config.tls_cert_file else None
    address = f"{in_url(config.service_host)}:{config.service_grpc_port}"
    try:
        await server.start(address, credentials)
    except RuntimeError:  # gRPC does not say why
        raise OSError(0, "nothing can listen there", address) from None
    await stop.wait()
    await server.drain(config.drain_timeout_s)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments: `index`, the number of this worker."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway",
        description="Serve HTTP and gRPC in front of the model. Settings are environment variables: "
        "python -m engine.settings.table",
    )
    parser.add_argument("--index", type=int, default=0, help="which of the workers this is, for the log")
    return parser.parse_args()


def main() -> int:
    """Run one worker and return its exit status: 0 after a stop signal, 1 if it cannot listen."""
    index = parse_arguments().index
    config = Config.from_env()
    configure(config.log_level, process=f"worker {index}")
    allow_connections()
    collect_garbage_seldom(OF_REQUESTS)
    try:
        asyncio.run(run(config))
    except OSError as error:
        address = error.filename or f"{config.service_host}:{config.service_http_port}"
        log.error("cannot serve on %s: %s", address, error.strerror)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(str(error))
