"""Rendezvous of the engines of several machines on INTER_NODE_PORT. Independent of models and executors.

A follower connects to the master and sends its settings. The master refuses it with a reason, or replies once all
followers are connected. Then each host connects to the hosts before it, for the all-reduce. Nothing is encrypted; only
connections from the addresses in POD_IPS are accepted.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import socket
import struct
import time
import uuid
from collections.abc import Iterator
from ipaddress import ip_address
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from engine.errors import ConfigError, HostLost, SetupError
from engine.executors.distributed.ranks import RankFailed, pack, unpack
from engine.log import Report
from engine.ops.cpu import group
from engine.settings.machines import Machines

log = logging.getLogger(__name__)

FOLLOW, SUMS = "follow", "sums"  # first message of a caller: [FOLLOW, facts] or [SUMS, rendezvous_id]
GO, REFUSED = "go", "refused"  # the master's reply to FOLLOW: [GO, rendezvous_id] or [REFUSED, reason]
MAX_HELLO_BYTES = 4096
HELLO_S = 5  # seconds to wait for the first message of a connection
CALL_S, CALL_AGAIN_S = 5.0, 0.5
MEET_S = 30.0  # seconds to make all connections, once all followers have called the master
ComparableSettings = dict[str, Any]  # values that must be equal on all hosts, by readable names
Peers = tuple[socket.socket, ...]  # connections for the all-reduce: one to each other host, in host order


class IncomingConnection(NamedTuple):
    """An accepted connection of another host, and the first message that it sent."""

    host: int
    sock: socket.socket
    hello: tuple[Any, ...]

    def connection(self) -> Connection:
        return Connection(self.sock.detach())


def wait_for_followers(
    machines: Machines, port: int, ours: ComparableSettings, report: Report
) -> tuple[list[Connection], Peers]:
    """Wait on the master for all followers, and pass to `report` which are missing. Return a connection to each
    follower, in host order, and the connections for the all-reduce."""
    with listen(machines, port) as listener:
        followers = accept_followers(listener, machines, ours, report)
        rendezvous_id = uuid.uuid4().hex
        for ip, follower in zip(machines.ips[1:], followers, strict=True):
            with raise_host_lost(ip):
                follower.send_bytes(pack(GO, rendezvous_id))
        return followers, connect_peers(listener, machines, rendezvous_id)


def join_master(machines: Machines, port: int, ours: ComparableSettings) -> tuple[Connection, Peers]:
    """Wait on a follower for the master and all other hosts. Return the connection to the master, and those for the
    all-reduce. Raises SetupError if the master refuses this host."""
    with listen(machines, port) as listener:
        while True:
            try:
                master = Connection(connect_to(machines, 0, port, pack(FOLLOW, ours)).detach())
                kind, text = unpack(master.recv_bytes(MAX_HELLO_BYTES))
                break
            except (OSError, EOFError):
                time.sleep(CALL_AGAIN_S)
        if kind != GO:
            raise SetupError(f"{machines.ips[0]}, which serves, refuses {machines.ips[machines.host]}: {text}")
        return master, connect_peers(listener, machines, text)


def accept_followers(
    listener: socket.socket, machines: Machines, ours: ComparableSettings, report: Report
) -> list[Connection]:
    """Accept calls until every follower is connected. Return their connections in host order."""
    followers: dict[int, Connection] = {}
    while missing := [ip for host, ip in enumerate(machines.ips) if host and host not in followers]:
        report(f"waits for {', '.join(missing)}")
        ready = wait([listener, *followers.values()])
        for host, follower in [*followers.items()]:
            if follower in ready:  # A follower sends nothing while it waits, so it has ended.
                followers.pop(host).close()
        incoming = accept(listener, machines) if listener in ready else None
        if incoming is None:
            continue
        if why := reason_to_refuse(incoming.hello, ours):
            warn_once(machines.ips[incoming.host], why)
            refuse(incoming, why)
            continue
        if incoming.host in followers:  # It has restarted, and the end of its old connection was not seen.
            followers[incoming.host].close()
        followers[incoming.host] = incoming.connection()
    return [followers[host] for host in sorted(followers)]


def reason_to_refuse(hello: tuple[Any, ...], ours: ComparableSettings) -> str:
    """Return why a caller with the message `hello` cannot follow, or an empty string if it can."""
    if hello[0] != FOLLOW or len(hello) != 2 or not isinstance(hello[1], dict):
        return "it does not ask to follow"
    different = [f"{name} is {hello[1].get(name)!r} there, {value!r} here" for name, value in ours.items()
                 if hello[1].get(name) != value]  # fmt: skip
    return "; ".join(different)


def refuse(incoming: IncomingConnection, why: str) -> None:
    with contextlib.suppress(OSError), incoming.connection() as connection:
        connection.send_bytes(pack(REFUSED, why))


def connect_peers(listener: socket.socket, machines: Machines, rendezvous_id: str) -> Peers:
    """Connect to the hosts before this one and accept those after it. Return one socket for each, in host order. Raises
    HostLost."""
    peers = {}
    port = listener.getsockname()[1]
    for host in range(machines.host):
        with raise_host_lost(machines.ips[host]):
            peers[host] = connect_to(machines, host, port, pack(SUMS, rendezvous_id))
    deadline = time.monotonic() + MEET_S
    while missing := [host for host in range(machines.num_hosts) if host not in peers and host != machines.host]:
        if not wait([listener], deadline - time.monotonic()):
            raise HostLost(machines.ips[missing[0]])
        incoming = accept(listener, machines)
        if incoming and incoming.host in missing and incoming.hello == (SUMS, rendezvous_id):
            peers[incoming.host] = incoming.sock
        elif incoming:  # It has restarted. It will call again, and this engine restarts, too.
            incoming.sock.close()
    return tuple(peers[host] for host in sorted(peers))


def listen(machines: Machines, port: int) -> socket.socket:
    """Listen on this host's address. Wait while the machine does not have that address. Raises ConfigError."""
    ip = machines.ips[machines.host]
    while True:
        try:
            return socket.create_server((ip, port), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                why = f"INTER_NODE_PORT is {port}, which cannot be used on {ip} (HOST_IP): {error.strerror}"
                raise ConfigError(why) from None
            log.warning("this machine has no address %s now, waiting for it", ip)  # it had it at the start
            time.sleep(CALL_S)


def accept(listener: socket.socket, machines: Machines) -> IncomingConnection | None:
    """Accept one connection. Return None if it does not come from a host of POD_IPS, or sends no valid message."""
    try:
        sock, address = listener.accept()
    except OSError:  # The caller has closed the connection already.
        return None
    ip = str(ip_address(address[0]))
    try:
        if ip not in machines.ips:
            raise ValueError("it is none of POD_IPS")
        hello = read_hello(sock)
    except (OSError, EOFError, ValueError) as error:
        warn_once(ip, str(error))
        sock.close()
        return None
    group.notice_silence(sock)
    return IncomingConnection(machines.ips.index(ip), sock, hello)


@functools.lru_cache(maxsize=100)
def warn_once(ip: str, why: str) -> None:
    """Log that `ip` is refused, once for each reason, because it keeps calling."""
    log.warning("%s is refused: %s", ip, why)


def read_hello(sock: socket.socket) -> tuple[Any, ...]:
    """Receive the first message of a connection within HELLO_S seconds. Raises ValueError if it is malformed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HELLO_S, 0))
    with Connection(os.dup(sock.fileno())) as connection:
        hello = unpack(connection.recv_bytes(MAX_HELLO_BYTES))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    if not isinstance(hello, tuple) or not hello:
        raise ValueError("it says nothing that makes sense")
    return hello


def connect_to(machines: Machines, host: int, port: int, hello: bytes) -> socket.socket:
    """Connect to `host` from this host's own address in POD_IPS and send `hello`."""
    sock = socket.create_connection((machines.ips[host], port), CALL_S, (machines.ips[machines.host], 0))
    sock.settimeout(None)
    group.notice_silence(sock)
    with Connection(os.dup(sock.fileno())) as connection:
        connection.send_bytes(hello)
    return sock


@contextlib.contextmanager
def raise_host_lost(ip: str) -> Iterator[None]:
    """Raise HostLost in place of a connection error."""
    try:
        yield
    except (OSError, EOFError, RankFailed) as error:
        raise HostLost(ip) from error
