"""How many connections HTTP has, and how much they hold that have not said all of a request's head: half a megabyte
may be of each. What comes after the head is counted in intake.py."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Sequence

from aiohttp import web

from gateway.inet_diag import Peer, a_peer, watch

MAX_CONNECTIONS = 4096
BACKLOG = 1024  # connections that nobody has taken yet
NUM_FILES = 1 << 16  # connections and what they need, if the system allows it
MAX_HEADERS, MAX_HEADER_BYTES = 64, 8190  # of one request; of each


class ConnectionLimiter:
    """Beyond what there may be, those without a request are closed: of too much those that have sent most, of too many
    the oldest."""

    def __init__(self, server: web.Server, running: list[web.Request], begun: set[Peer], max_bytes: int):
        self._server = server
        self._running = running
        self._begun = begun  # who has begun a request since the last look
        self._max_bytes = max_bytes
        self._known: dict[Peer, int] = {}  # bytes before the head that comes now

    async def watch(self, ports: Sequence[int]) -> None:
        await watch(ports, self._look, self._could_be_too_much)

    def _could_be_too_much(self) -> bool:
        num_connections = len(self._server.connections)
        num_waiting = num_connections - len(self._running)
        if len(self._begun) > 2 * MAX_CONNECTIONS:  # without a look, those are kept that are still there
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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < NUM_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(NUM_FILES, hard), hard))


def peer_of(transport: asyncio.BaseTransport | None) -> Peer | None:
    name = transport.get_extra_info("peername") if transport else None
    return a_peer(*name[:2]) if name else None
