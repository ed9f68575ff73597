"""Ports of the server: which setting names them, whether they are free, and which process uses one."""

from __future__ import annotations

import errno
import glob
import os
import socket
from pathlib import Path

from engine.settings.config import Config
from engine.settings.disaggregation import PREFILL

LISTENING = "0A"  # in /proc/net/tcp


def ports_of(config: Config) -> dict[str, tuple[str, int]]:
    """Return the address and port for each variable that names a port to listen on."""
    host = config.service_host
    ports = {
        "HEALTH_HTTP_PORT": (host, config.health_http_port),
        "SERVICE_GRPC_PORT": (host, config.service_grpc_port),
        "METRICS_HTTP_PORT": (host, config.metrics_http_port),
    }
    if config.splitwise_role == PREFILL:
        ports["ENGINE_WORKER_QUEUE_PORT"] = (host, config.engine_worker_queue_port)
    if config.replica_cache_port > 0:
        ports["REPLICA_CACHE_PORT"] = (host, config.replica_cache_port)
    if config.mp_nnode > 1:
        ports["INTER_NODE_PORT"] = (config.machines.ips[config.machines.host], config.inter_node_port)
    if config.service_http_port > 0:
        ports["SERVICE_HTTP_PORT"] = (host, config.service_http_port)
    if config.triton_http_port > 0:
        ports["TRITON_HTTP_PORT"] = (host, config.triton_http_port)
    return ports


def problems(config: Config) -> list[str]:
    """Return a sentence for each port that the server cannot listen on."""
    texts = [_problem(name, *address) for name, address in ports_of(config).items()]
    return [text for text in dict.fromkeys(texts) if text]  # a wrong host is reported once, not per port


def wrong_hosts(config: Config) -> list[str]:
    """Return a sentence for each host name that is no address of this machine, whether its ports are taken or not."""
    texts = [_problem(name, host, 0) for name, (host, _) in ports_of(config).items()]  # 0: any free port
    return [text for text in dict.fromkeys(texts) if text]


def _problem(variable: str, host: str, port: int) -> str:
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignores closed connections
            sock.bind(address)
            sock.listen(1)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host name cannot be encoded
        number, why = getattr(error, "errno", None), getattr(error, "strerror", error)
        if isinstance(error, (socket.gaierror, UnicodeError)) or number == errno.EADDRNOTAVAIL:
            name = "HOST_IP" if variable == "INTER_NODE_PORT" else "SERVICE_HOST"
            return f"{name} is {host!r}, which is no address of this machine: {why}"
        if number != errno.EADDRINUSE:
            return f"{variable} is {port}, which cannot be used: {why}"
        owner = owner_of(port)
        return f"{variable} is {port}, which is taken{f' by {owner}' if owner else ''}; set {variable} to a free port"
    return ""


def owner_of(port: int) -> str:
    """Return `name (pid 123)` of the process that listens on the port, or "" if this user may not see it."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for fd in glob.iglob("/proc/[0-9]*/fd/*") if sockets else ():  # processes of other users are hidden
        try:
            if os.readlink(fd) in sockets:
                pid = fd.split("/")[2]
                return f"{Path('/proc', pid, 'comm').read_text(errors='replace').strip()} (pid {pid})"
        except OSError:
            continue  # the file was closed or the process has ended
    return ""


def _listening_inodes(port: int) -> list[str]:
    tables = [path for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    lines = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    return [line[9] for line in lines if line[3] == LISTENING and int(line[1].rpartition(":")[2], 16) == port]
