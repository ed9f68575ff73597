"""Limits of HTTP connections: how many there are, and how many bytes of incomplete request headers they hold, which can
be half a megabyte each. Bytes of bodies are counted in body_memory.py.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Collection, Sequence

from aiohttp import web

from gateway.inet_diag import Peer, a_peer, watch

MAX_CONNECTIONS = 4096
BACKLOG = 1024  # connections that are not accepted yet
NUM_FILES = 1 << 16  # open files, if the system allows it
MAX_HEADERS, MAX_HEADER_BYTES = 64, 8190  # limits of one request: number of headers, size of each


class ConnectionLimiter:
    """Closes connections without a running request when a limit is exceeded: first those that have sent the most bytes
    of incomplete headers, then the oldest ones if there are too many connections.
    """

    def __init__(self, server: web.Server, running: list[web.Request], begun: set[Peer], max_bytes: int):
        self._server = server
        self._running = running
        self._begun = begun  # peers that have started a request since the last check
        self._max_bytes = max_bytes
        self._known: dict[Peer, int] = {}  # bytes received before the current request's headers

    async def watch(self, ports: Sequence[int]) -> None:
        """Check the connections to `ports` periodically, until cancelled."""
        await watch(ports, self._look, self._peers)

    def _peers(self) -> Collection[Peer]:
        """Return the clients of all connections if these could be too many or hold too much, or else nothing."""
        if not self._could_be_too_much():
            return ()
        return [peer for each in self._server.connections if (peer := peer_of(each.transport))]

    def _could_be_too_much(self) -> bool:
        num_connections = len(self._server.connections)
        num_waiting = num_connections - len(self._running)
        if len(self._begun) > 2 * MAX_CONNECTIONS:  # there was no check for long: keep only open connections
            self._begun.intersection_update([peer_of(each.transport) for each in self._server.connections])
        return num_waiting * MAX_HEADERS * MAX_HEADER_BYTES > self._max_bytes or num_connections > MAX_CONNECTIONS

    def _look(self, received: dict[Peer, int]) -> None:
        busy = {peer for each in self._running if (peer := peer_of(each.transport))} | self._begun
        self._begun.clear()
        peers = [(peer_of(each.transport), each) for each in self._server.connections]
        waiting = {peer: each for peer, each in peers if peer and peer not in busy}
        self._known = {peer: self._known.get(peer, 0) if peer in waiting else num for peer, num in received.items()}
        held = {peer: received.get(peer, 0) - self._known.get(peer, 0) for peer in waiting}
        num_held, num_open = sum(held.values()), len(peers)
        for peer in sorted(held, key=held.__getitem__, reverse=True):
            if num_held <= self._max_bytes:
                break
            waiting.pop(peer).force_close()
            num_held, num_open = num_held - held[peer], num_open - 1
        for each in [*waiting.values()][: max(0, num_open - MAX_CONNECTIONS)]:
            each.force_close()


def allow_connections() -> None:
    """Raise the process's limit of open files, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < NUM_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(NUM_FILES, hard), hard))


def peer_of(transport: asyncio.BaseTransport | None) -> Peer | None:
    """Return the client's address of a connection, or None if it is closed."""
    name = transport.get_extra_info("peername") if transport else None
    return a_peer(*name[:2]) if name else None
