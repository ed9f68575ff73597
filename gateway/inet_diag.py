"""Number of bytes that each TCP connection of a port has received, from the kernel (linux/inet_diag.h)."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence

log = logging.getLogger(__name__)

CHECK_EVERY_S = 0.2
MAX_SHARE = 0.1  # largest share of this process's time spent on checks
Peer = tuple[bytes, int]  # address and port of a client
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, NLMSG_DONE, NLMSG_ERROR = 4, 20, 0x301, 3, 2
INET_DIAG_INFO, ESTABLISHED, INFO_BYTES_RECEIVED = 2, 1 << 1, 128
HEADER, QUESTION, ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")
PEER_PORT, PEER_ADDRESS, ATTRIBUTES = 6, 24, 72  # offsets in a message
IPV4_MAPPED = bytes(10) + b"\xff\xff"  # prefix of an IPv4 address mapped into IPv6


async def watch(ports: Sequence[int], look: Callable[[dict[Peer, int]], None], has_to: Callable[[], bool]) -> None:
    """Call `look` periodically with the bytes received by each connection to `ports`, whenever `has_to` returns True.

    Return only if the kernel does not support the query.
    """
    try:
        while True:
            started = time.monotonic()
            if has_to():
                look({peer: count for port in ports for peer, count in received_by(port).items()})
            await asyncio.sleep(max(CHECK_EVERY_S, (time.monotonic() - started) / MAX_SHARE))
    except OSError as error:
        log.warning("the kernel does not report received bytes, so incomplete requests are not limited: %s", error)


def received_by(port: int) -> dict[Peer, int]:
    """Return the bytes that each connection to this port has received. Raise OSError."""
    found: dict[Peer, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as sock:
        for family, num_bytes in ((socket.AF_INET, 4), (socket.AF_INET6, 16)):
            question = QUESTION.pack(family, socket.IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), 0, ESTABLISHED)
            question += port.to_bytes(2, "big") + bytes(38) + b"\xff" * 8
            sock.send(HEADER.pack(HEADER.size + len(question), SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 0, 0) + question)
            for message in _messages(sock):
                if (received := _info(message)) is not None:
                    other = int.from_bytes(message[PEER_PORT : PEER_PORT + 2], "big")
                    found[_plain(message[PEER_ADDRESS : PEER_ADDRESS + num_bytes]), other] = received
    return found


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
