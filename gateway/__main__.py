"""One worker process: listens beside its siblings on one port (SO_REUSEPORT), and drains when told to stop.

SIGTERM or SIGINT: stop listening, let running requests go on for the drain timeout, then end them with an error event;
exit status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger

from engine.log import configure
from gateway.app import BACKEND, DRAINING, RUNNING, make_app
from gateway.backend import GatewaySettings, timeout
from gateway.triton_client import TritonBackend

log = logging.getLogger("gateway")

BACKLOG = 1024
LAST_WORDS_S = 2.0  # for the error events after the drain timeout


async def serve(app: web.Application, sock: socket.socket, stop: asyncio.Event, drain_timeout_s: float) -> None:
    """Serves until `stop` is set, then drains."""
    server_logger.addFilter(_without_bytes)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=LAST_WORDS_S, auto_decompress=False
    )
    await runner.setup()
    site = web.SockSite(runner, sock, backlog=BACKLOG)
    await site.start()
    log.info("listening on %s:%d", *sock.getsockname()[:2])
    await stop.wait()
    asyncio.get_running_loop().remove_reader(sock)
    await asyncio.sleep(
        0
    )  # asyncio forgets connections that it has accepted, but not yet begun, when the server closes
    await site.stop()
    await drain(app, drain_timeout_s)
    await runner.cleanup()  # closes idle connections, cancels what is stuck in a client
    log.info("stopped")


def _without_bytes(record: logging.LogRecord) -> bool:
    """aiohttp logs what is no HTTP with its bytes and a traceback: the one line without them is enough."""
    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
        record.exc_info = None
    return True


async def drain(app: web.Application, timeout_s: float) -> None:
    """New requests on open connections are refused, running ones may end; what runs longer ends with an error."""
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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((host, port))
    return sock


async def run(options: argparse.Namespace) -> None:
    settings = GatewaySettings(
        model_name=options.model_name,
        max_body_bytes=options.max_body_bytes,
        api_key=os.environ.get("API_KEY", ""),  # no option: others on the machine can read command lines
        cors_allow_origin=options.cors_allow_origin,
        drain_timeout_s=options.drain_timeout,
        request_timeout_s=options.request_timeout,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    app = make_app(TritonBackend(options.grpc_host, options.grpc_port), settings)
    await serve(app, listen(options.host, options.port), stop, settings.drain_timeout_s)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    defaults = GatewaySettings()
    parser = argparse.ArgumentParser(prog="python -m gateway", description="Serve HTTP in front of the model.")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, required=True, help="SERVICE_HTTP_PORT")
    parser.add_argument("--grpc-host", default="127.0.0.1")
    parser.add_argument("--grpc-port", type=int, required=True, help="SERVICE_GRPC_PORT")
    parser.add_argument("--model-name", default=defaults.model_name, help="the name in /v1/models")
    parser.add_argument("--max-body-bytes", type=int, default=defaults.max_body_bytes)
    parser.add_argument("--cors-allow-origin", default=defaults.cors_allow_origin, help="empty: no CORS headers")
    parser.add_argument("--drain-timeout", type=float, default=defaults.drain_timeout_s, help="seconds after SIGTERM")
    parser.add_argument("--request-timeout", type=float, default=defaults.request_timeout_s, help="seconds of silence")
    parser.add_argument("--workers-index", type=int, default=0, help="which of the workers this is, for the log")
    parser.add_argument("--log-level", default="INFO", help="LOG_LEVEL")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_arguments()
    configure(options.log_level, process=f"worker {options.workers_index}")
    try:
        asyncio.run(run(options))
    except OSError as error:
        log.error("cannot serve on %s:%d: %s", options.host, options.port, error.strerror)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
