"""The ranks of several machines as one executor. The engine of the master serves, those of the other hosts follow it.

How they meet, on INTER_NODE_PORT: a follower calls the master and says what it has. It is refused with the reason, or
told to go on once all are there. Then every host calls those before it, for the sums; all load their ranks; and a
follower does what it is told over its first connection, as any rank does.

A host that ends or falls silent ends the engines of all: HostLost. Who started them starts them again, and they meet
again. Nothing is encrypted; only the addresses of POD_IPS are listened to.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import signal
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from engine.core.types import Batch, Executor, Step
from engine.errors import ConfigError, HostLost, SetupError
from engine.executors import LOADING, make_host
from engine.executors.ranks import RankFailed, RanksExecutor, pack, serve, unpack, wait_until_ready
from engine.exporting.manifest import CONFIG, MANIFEST
from engine.ops.cpu import group
from engine.settings.config import Config
from engine.settings.machines import Machines

log = logging.getLogger(__name__)

FOLLOW, SUMS = "follow", "sums"  # what a caller wants: [FOLLOW, facts], [SUMS, meeting]
GO, REFUSED = "go", "refused"  # what the master says to FOLLOW: [GO, meeting], [REFUSED, why]
MAX_HELLO_BYTES = 4096
HELLO_S = 5  # for the first message of a connection to come
CALL_S, CALL_AGAIN_S = 5.0, 0.5
MEET_S = 30.0  # for all connections to be made, once everybody is there
NOTICED_S = group.SILENCE_S / 3 + 1  # until it is known everywhere that a host has ended
Tell = Callable[[str], None]


class HostsExecutor(RanksExecutor):
    """`first` is this host's executor; behind `others` are hosts that follow."""

    def launch(self, batch: Batch) -> Step:
        with noticed_first():
            return StepOfHosts(super().launch(batch))


class StepOfHosts:
    def __init__(self, step: Step):
        self._step = step
        self.mask = step.mask

    def result(self) -> Any:
        with noticed_first():
            return self._step.result()


class Caller(NamedTuple):
    host: int
    sock: socket.socket
    hello: tuple[Any, ...]

    def connection(self) -> Connection:
        return Connection(self.sock.detach())


def lead(graph_dir: Path, config: Config, tell: Tell) -> Executor:
    """The executor of all hosts, made by the master. Waits for the others and tells for whom; raises HostLost."""
    machines = config.machines
    with listen(machines, config.inter_node_port) as listener:
        followers = gather(listener, machines, facts(graph_dir, config), tell)
        meeting = uuid.uuid4().hex
        for host, follower in followers.items():
            with lost(machines.ips[host]):
                follower.send_bytes(pack(GO, meeting))
        peers = meet(listener, machines, meeting)
    tell(LOADING)
    executor = make_host(graph_dir, config, peers)
    for host, follower in sorted(followers.items()):
        with lost(machines.ips[host]):
            wait_until_ready([follower])
        end_with(follower, machines.ips[host])
    return HostsExecutor(executor, [followers[host] for host in sorted(followers)])


def follow(graph_dir: Path, config: Config, tell: Tell) -> NoReturn:
    """What the engine does on a host that is not the master, until that ends: raises HostLost. Tells what it waits for,
    in the end nothing."""
    machines = config.machines
    with listen(machines, config.inter_node_port) as listener:
        tell(f"waits for {machines.ips[0]}, which serves")
        master, meeting = find_master(machines, config.inter_node_port, facts(graph_dir, config))
        peers = meet(listener, machines, meeting)
    tell(LOADING)
    executor = make_host(graph_dir, config, peers)
    end_with(master, machines.ips[0])
    log.info("ready: ranks %d to %d follow %s", machines.ranks[0], machines.ranks[-1], machines.ips[0])
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # there is nothing to finish; our children die with us
    tell("")
    with noticed_first():
        serve(master, executor)
    raise HostLost(machines.ips[0])


def facts(graph_dir: Path, config: Config) -> dict[str, Any]:
    """What must be the same on all hosts."""
    model = hashlib.sha256(b"".join((graph_dir / name).read_bytes() for name in (MANIFEST, CONFIG)))
    names = ",".join(config.machines.ips)
    settings = {"MP_NUM": config.mp_num, "POD_IPS": names, "BATCH_SIZE": config.batch_size}
    return {**settings, f"the hash of {MANIFEST} and {CONFIG}": model.hexdigest()[:16]}


def gather(listener: socket.socket, machines: Machines, ours: dict[str, Any], tell: Tell) -> dict[int, Connection]:
    """A connection to every other host, each of which has what we have."""
    followers: dict[int, Connection] = {}
    while missing := [ip for host, ip in enumerate(machines.ips) if host and host not in followers]:
        tell(f"waits for {', '.join(missing)}")
        for ready in wait([listener, *followers.values()]):
            if ready is not listener:  # who waits with us has nothing to say: it has ended
                [host] = [host for host, follower in followers.items() if follower is ready]
                followers.pop(host).close()
            elif (caller := accept(listener, machines)) is not None:
                if why := why_refused(caller.hello, ours):
                    log.warning("%s is refused: %s", machines.ips[caller.host], why)
                    refuse(caller, why)
                else:
                    if caller.host in followers:  # it has started anew, and how its connection ended was lost
                        followers[caller.host].close()
                    followers[caller.host] = caller.connection()
    return followers


def why_refused(hello: tuple[Any, ...], ours: dict[str, Any]) -> str:
    if hello[0] != FOLLOW or len(hello) != 2 or not isinstance(hello[1], dict):
        return "it does not ask to follow"
    different = [f"{name} is {hello[1].get(name)!r} there, {value!r} here" for name, value in ours.items()
                 if hello[1].get(name) != value]  # fmt: skip
    return "; ".join(different)


def refuse(caller: Caller, why: str) -> None:
    with contextlib.suppress(OSError), caller.connection() as connection:
        connection.send_bytes(pack(REFUSED, why))


def find_master(machines: Machines, port: int, ours: dict[str, Any]) -> tuple[Connection, str]:
    """Its connection and the name of the meeting, once all are there."""
    while True:
        try:
            sock = call(machines, 0, port, pack(FOLLOW, ours))
            master = Connection(sock.detach())
            kind, text = unpack(master.recv_bytes(MAX_HELLO_BYTES))
        except (OSError, EOFError):
            time.sleep(CALL_AGAIN_S)
            continue
        if kind == GO:
            return master, text
        raise SetupError(f"{machines.ips[0]}, which serves, refuses {machines.ips[machines.host]}: {text}")


def meet(listener: socket.socket, machines: Machines, meeting: str) -> tuple[socket.socket, ...]:
    """For the sums: a connection to each other host, in their order."""
    peers = {}
    port = listener.getsockname()[1]
    for host in range(machines.host):
        with lost(machines.ips[host]):
            peers[host] = call(machines, host, port, pack(SUMS, meeting))
    deadline = time.monotonic() + MEET_S
    while missing := [host for host in range(machines.num_hosts) if host not in peers and host != machines.host]:
        if not wait([listener], deadline - time.monotonic()):
            raise HostLost(machines.ips[missing[0]])
        caller = accept(listener, machines)
        if caller and caller.host in missing and caller.hello == (SUMS, meeting):
            peers[caller.host] = caller.sock
        elif caller:  # it has started anew; it will call again, and we start anew, too
            caller.sock.close()
    return tuple(peers[host] for host in sorted(peers))


def listen(machines: Machines, port: int) -> socket.socket:
    ip = machines.ips[machines.host]
    try:
        return socket.create_server((ip, port), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"INTER_NODE_PORT {port} of {ip} (HOST_IP) cannot be used: {error.strerror}") from None


def accept(listener: socket.socket, machines: Machines) -> Caller | None:
    """None: it was none of us, or said nothing that makes sense. Host and what it has said otherwise."""
    try:
        sock, address = listener.accept()
    except OSError:  # it has gone again
        return None
    ip = str(ip_address(address[0]))
    try:
        if ip not in machines.ips:
            raise ValueError("it is none of POD_IPS")
        hello = read_hello(sock)
    except (OSError, EOFError, ValueError) as error:
        log.warning("a connection from %s is refused: %s", ip, error)
        sock.close()
        return None
    group.notice_silence(sock)
    return Caller(machines.ips.index(ip), sock, hello)


def read_hello(sock: socket.socket) -> tuple[Any, ...]:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HELLO_S, 0))
    with Connection(os.dup(sock.fileno())) as connection:
        hello = unpack(connection.recv_bytes(MAX_HELLO_BYTES))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    if not isinstance(hello, tuple) or not hello:
        raise ValueError("it says nothing that makes sense")
    return hello


def call(machines: Machines, host: int, port: int, hello: bytes) -> socket.socket:
    """From the address by which the others know us."""
    sock = socket.create_connection((machines.ips[host], port), CALL_S, (machines.ips[machines.host], 0))
    sock.settimeout(None)
    group.notice_silence(sock)
    with Connection(os.dup(sock.fileno())) as connection:
        connection.send_bytes(hello)
    return sock


def end_with(connection: Connection, ip: str) -> None:
    """This process ends when the host at the other end does: our ranks may wait for it in the middle of an op."""

    def watch() -> None:
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        poll.poll()
        if not connection.closed:
            log.error("%s; the engine starts anew and waits for it", HostLost(ip))
            logging.shutdown()
            os._exit(HostLost.exit_status)

    threading.Thread(target=watch, name=f"watches {ip}", daemon=True).start()


@contextlib.contextmanager
def noticed_first() -> Iterator[None]:
    """An op or a connection that fails when another host ends does so before `end_with` may have noticed that."""
    try:
        yield
    except Exception:
        time.sleep(NOTICED_S)
        raise


@contextlib.contextmanager
def lost(ip: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, RankFailed) as error:
        raise HostLost(ip) from error
