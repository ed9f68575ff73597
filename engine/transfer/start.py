"""Makes the engine loop that of a prefill or decode instance, as SPLITWISE_ROLE says."""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Mapping

from engine.core.loop import EngineLoop
from engine.core.prefill_jobs import PrefillJobs
from engine.core.remote_prefill import RemotePrefill
from engine.errors import ConfigError
from engine.exporting.files import model_hash
from engine.exporting.manifest import Manifest
from engine.settings.config import Config
from engine.settings.device import CPU, with_device
from engine.settings.disaggregation import DECODE, PREFILL
from engine.settings.processes import ENGINE_PROGRESS_FILE
from engine.settings.tls import server_context
from engine.transfer.client import PrefillClient, PulledBlocks
from engine.transfer.messages import PROTOCOL
from engine.transfer.server import PrefillServer, ServedBlocks

log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 0.8  # prefill instances that refuse end the start; those that answer later are connected later


def start_transfer(loop: EngineLoop, config: Config, wake: Callable[[], None]) -> None:
    """Connect the loop with other instances. `wake` is called when a job arrives. Raises ConfigError."""
    role = config.splitwise_role
    if with_device(config).device != CPU:
        raise ConfigError(f"SPLITWISE_ROLE is {role}: KV blocks can only be transferred with DEVICE=cpu so far")
    access = loop.executor.blocks()  # type: ignore[attr-defined]
    if role == PREFILL:
        model = Manifest.read(config.graph_path)
        loop.jobs = PrefillJobs(loop.scheduler, wake)
        served = ServedBlocks(loop.jobs, access.read_block, identity(config), model.vocab_size, model.max_seq_len)
        address = config.service_host, config.engine_worker_queue_port
        try:
            server = PrefillServer(address, served, config.peer_token, server_context(config))
        except OSError as error:
            raise ConfigError(f"ENGINE_WORKER_QUEUE_PORT is {address[1]}, which cannot be used: {error}") from None
        log.info("prompts of decode instances are computed, port %d", server.port)
    elif role == DECODE:
        check_hosts(config)
        pulled = PulledBlocks(access.write_block, len(access.read_block(0)), identity(config))
        client = PrefillClient(config.prefill_addresses, pulled, config.peer_token, lambda host: tls_of(config, host))
        refusals = client.refusals(ANSWER_WITHIN_S)
        if (
            refusals and not config.engine_path(ENGINE_PROGRESS_FILE, config.engine_index).exists()
        ):  # else this is a restart
            raise ConfigError("; ".join(refusals))
        loop.remote = RemotePrefill(loop.scheduler, client, config.remote_prefill_min_tokens)


def identity(config: Config) -> Mapping[str, str]:
    """Return what two instances must have in common for their blocks to be equal to the last bit."""
    from engine.ops.cpu import cpu_isa

    model = model_hash(config.graph_path)
    return {"protocol version": str(PROTOCOL), "model (hash)": model, "instruction set (CPU_ISA)": cpu_isa()}


def check_hosts(config: Config) -> None:
    """Raise ConfigError for a prefill instance whose name cannot be resolved."""
    for host, port in config.prefill_addresses:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"PREFILL_INSTANCES has {host}:{port}, which cannot be resolved: {error}") from None


def tls_of(config: Config, host: str) -> ssl.SSLContext | None:
    """Return the TLS context for connections to `host`, or None without TLS. Certificates of the authorities that this
    system trusts are accepted, and the certificate of this server; on this machine it may have any name."""
    if not config.tls_cert_file:
        return None
    context = ssl.create_default_context()
    context.load_verify_locations(config.tls_cert_file)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # without the certificate of its authority
    context.check_hostname = not _is_loopback(host)
    return context


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
