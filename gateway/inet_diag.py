"""Number of bytes that each TCP connection of a port has received, from the kernel (linux/inet_diag.h)."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

log = logging.getLogger(__name__)

CHECK_EVERY_S = 0.2
MAX_SHARE = 0.1  # largest share of this process's time spent on checks
MAX_LOOKUPS = 64  # connections of one check that are looked up; with more, all are listed
Peer = tuple[bytes, int]  # address and port of a client
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, REQUEST, REQUEST_DUMP, NLMSG_DONE, NLMSG_ERROR = 4, 20, 1, 0x301, 3, 2
INET_DIAG_INFO, ESTABLISHED, INFO_BYTES_RECEIVED = 2, 1 << 1, 128
HEADER, QUESTION, ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")
# Offsets in a message
FAMILY, STATE, SOCKET_ID, PEER_PORT, PEER_ADDRESS, SOCKET_ID_END, ATTRIBUTES = 0, 1, 4, 6, 24, 52, 72
IPV4_MAPPED = bytes(10) + b"\xff\xff"  # prefix of an IPv4 address mapped into IPv6


async def watch(
    ports: Sequence[int], look: Callable[[dict[Peer, int]], None], peers: Callable[[], Collection[Peer]]
) -> None:
    """Call `look` periodically with the bytes received by each connection to `ports`, at least by those of `peers()`,
    whenever there are any.

    Return only if the kernel does not support the query.
    """
    connections = Connections(ports)
    try:
        while True:
            started = time.monotonic()
            if wanted := peers():
                look(connections.received(wanted))
            await asyncio.sleep(max(CHECK_EVERY_S, (time.monotonic() - started) / MAX_SHARE))
    except OSError as error:
        log.warning("the kernel does not report received bytes, so incomplete requests are not limited: %s", error)


class Connections:
    """Connections to some ports. Listing them takes the kernel milliseconds, in which it walks over the hash table of
    all sockets, and a lookup takes microseconds. So they are listed only to find the sockets of new connections."""

    def __init__(self, ports: Sequence[int]):
        self._ports = ports
        self._sockets: dict[Peer, bytes] = {}  # messages of the last list

    def received(self, peers: Collection[Peer]) -> dict[Peer, int]:
        """Return the bytes that connections have received, at least those of `peers` that are open. Raise OSError."""
        if len(peers) > MAX_LOOKUPS or not self._sockets.keys() >= set(peers):
            self._sockets = {peer: each for port in self._ports for peer, each in _listed(port).items()}
            return _counts(self._sockets)
        with _diag_socket() as sock:
            found = {peer: _looked_up(sock, self._sockets[peer]) for peer in peers}
        self._sockets = {peer: message for peer, message in self._sockets.items() if found.get(peer, message)}
        return _counts({peer: message for peer, message in found.items() if message})


def received_by(port: int) -> dict[Peer, int]:
    """Return the bytes that each connection to this port has received. Raise OSError."""
    return _counts(_listed(port))


def _counts(messages: Mapping[Peer, bytes]) -> dict[Peer, int]:
    return {peer: count for peer, message in messages.items() if (count := _info(message)) is not None}


def _diag_socket() -> socket.socket:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG)


def _listed(port: int) -> dict[Peer, bytes]:
    """Return the kernel's message about each connection to this port."""
    found: dict[Peer, bytes] = {}
    with _diag_socket() as sock:
        for family, num_bytes in ((socket.AF_INET, 4), (socket.AF_INET6, 16)):
            _send(sock, REQUEST_DUMP, family, port.to_bytes(2, "big") + bytes(38) + b"\xff" * 8)
            for message in _messages(sock):
                other = int.from_bytes(message[PEER_PORT : PEER_PORT + 2], "big")
                found[_plain(message[PEER_ADDRESS : PEER_ADDRESS + num_bytes]), other] = message
    return found


def _looked_up(sock: socket.socket, message: bytes) -> bytes | None:
    """Return the message about the same socket as `message`, or None if its connection has ended."""
    _send(sock, REQUEST, message[FAMILY], message[SOCKET_ID:SOCKET_ID_END])
    try:
        found = next(_messages(sock))
    except FileNotFoundError:
        return None
    return found if found[STATE] == message[STATE] else None


def _send(sock: socket.socket, flags: int, family: int, socket_id: bytes) -> None:
    question = QUESTION.pack(family, socket.IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), 0, ESTABLISHED) + socket_id
    sock.send(HEADER.pack(HEADER.size + len(question), SOCK_DIAG_BY_FAMILY, flags, 0, 0) + question)


def a_peer(host: str, port: int) -> Peer:
    """Return the key of a client's address."""
    host = host.partition("%")[0]  # without the interface name
    return _plain(socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)), port


def _plain(address: bytes) -> bytes:
    return address.removeprefix(IPV4_MAPPED)


def _messages(sock: socket.socket) -> Iterator[bytes]:
    while True:
        data, at = sock.recv(1 << 17), 0
        while at < len(data):
            length, kind, *_ = HEADER.unpack_from(data, at)
            if kind == NLMSG_DONE:
                return
            if kind == NLMSG_ERROR:
                raise OSError(-int.from_bytes(data[at + HEADER.size :][:4], sys.byteorder, signed=True), "inet_diag")
            yield data[at + HEADER.size : at + length]
            at += (length + 3) & ~3


def _info(message: bytes) -> int | None:
    at = ATTRIBUTES
    while at + ATTRIBUTE.size <= len(message):
        length, kind = ATTRIBUTE.unpack_from(message, at)
        if kind == INET_DIAG_INFO:
            return int.from_bytes(message[at + ATTRIBUTE.size + INFO_BYTES_RECEIVED :][:8], sys.byteorder)
        at += (length + 3) & ~3
    return None
