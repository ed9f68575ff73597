"""Makes the engine loop that of a prefill or decode instance, as SPLITWISE_ROLE says, or that of a replica which shares
its cached blocks."""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

from engine.core.loop import EngineLoop
from engine.core.prefill_jobs import PrefillJobs
from engine.core.remote_prefill import RemotePrefill
from engine.core.shared_prefixes import SharedPrefixes
from engine.errors import ConfigError
from engine.executors.block_access import BlockAccess, DeviceBlocks, SharedCaches
from engine.exporting.files import model_hash_of_any_ranks
from engine.exporting.manifest import Manifest
from engine.settings.config import Config
from engine.settings.device import CPU, with_device
from engine.settings.disaggregation import AUTO, CUDA_IPC, DECODE, MIXED, NIXL, PREFILL, TCP
from engine.settings.tls import server_context
from engine.transfer.client import PrefillClient, PulledBlocks, ReplicaClient
from engine.transfer.layout import BlockLayout
from engine.transfer.messages import PROTOCOL
from engine.transfer.server import Digests, PrefillServer, ServedBlocks

log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 0.8  # prefill instances that refuse end the start; those that answer later are connected later


def start_transfer(
    loop: EngineLoop, config: Config, wake: Callable[[], None], on_first_prompt: Callable[[], None] = lambda: None
) -> None:
    """Connect the loop with other instances. `wake` is called when a job arrives, `on_first_prompt` when the first
    prompt of a decode instance is computed. Raises ConfigError."""
    role, config = config.splitwise_role, with_device(config)
    access: BlockAccess = loop.executor.blocks()  # type: ignore[attr-defined]
    device, model = device_of(config, access), Manifest.read(config.graph_path)
    layout = BlockLayout.of(model)
    shared_identity = identity(config, loop.fingerprint if role == MIXED else 0)
    if role in (PREFILL, MIXED):
        jobs = PrefillJobs(loop.scheduler, wake, on_first_prompt)
        loop.serve_prefills(jobs)
        digests, shared = shared_by(config, device)
        served = ServedBlocks(
            jobs=jobs,
            read_block=access.read_block,
            identity=shared_identity,
            vocab_size=model.vocab_size,
            max_len=model.max_seq_len,
            digests=digests,
            shared=shared,
            layout=layout,
            transfer=_transfer_of(config),
            peer="a replica" if role == MIXED else "a decode instance",
        )
        _listen(config, served)
    if role in (DECODE, MIXED):
        pulled = PulledBlocks(
            write_block=access.write_block,
            block_bytes=layout.block_bytes,
            identity=shared_identity,
            device=device,
            needs_device=config.kv_transfer in (CUDA_IPC, NIXL),
            layout=layout,
            transfer=_transfer_of(config),
        )
        loop.pull_prefills((_shared_prefixes if role == MIXED else _remote_prefill)(loop, config, pulled))


def _listen(config: Config, served: ServedBlocks) -> None:
    """Serve blocks to decode instances or replicas. Raises ConfigError."""
    name, port, task = (
        "ENGINE_WORKER_QUEUE_PORT",
        config.engine_worker_queue_port,
        "prompts of decode instances are computed",
    )
    if config.splitwise_role == MIXED:
        name, port, task = (
            "REPLICA_CACHE_PORT",
            config.replica_cache_port,
            "cached blocks are sent to other replicas",
        )
    try:
        server = PrefillServer((config.service_host, port), served, config.peer_token, server_context(config))
    except OSError as error:
        raise ConfigError(f"{name} is {port}, which cannot be used: {error}") from None
    log.info("%s, port %d", task, server.port)


def _shared_prefixes(loop: EngineLoop, config: Config, pulled: PulledBlocks) -> SharedPrefixes:
    source = ReplicaClient(pulled, config.peer_token, partial(tls_of, config))
    return SharedPrefixes(loop.scheduler, source, config.remote_prefill_min_tokens, lambda: loop.token_s)


def _remote_prefill(loop: EngineLoop, config: Config, pulled: PulledBlocks) -> RemotePrefill:
    """Connect to the prefill instances. Raises ConfigError."""
    check_hosts(config)
    try:
        client = PrefillClient(config.prefill_addresses, pulled, config.peer_token, partial(tls_of, config))
    except OSError as error:
        text = f"KV_TRANSFER is {pulled.transfer}, but there is no memory to read blocks to: {error}"
        raise ConfigError(text) from None
    refusals = client.refusals(ANSWER_WITHIN_S)
    if refusals and not config.engine_is_back:  # an engine that has served before computes prompts itself
        raise ConfigError("; ".join(refusals))
    return RemotePrefill(loop.scheduler, client, config.remote_prefill_min_tokens)


def device_of(config: Config, access: BlockAccess) -> DeviceBlocks | None:
    """Return the blocks if KV_TRANSFER lets other processes copy or read them. Raises ConfigError."""
    if config.kv_transfer == NIXL:
        return cast(DeviceBlocks, access)
    if config.device == CPU and config.kv_transfer == CUDA_IPC:
        raise ConfigError(f"KV_TRANSFER is {CUDA_IPC}, which is for DEVICE=gpu; DEVICE is {CPU}")
    return cast(DeviceBlocks, access) if config.device != CPU and config.kv_transfer != TCP else None


def shared_by(config: Config, device: DeviceBlocks | None) -> tuple[Digests | None, Sequence[SharedCaches]]:
    """Return `digests` and `shared` of `ServedBlocks`. Raises ConfigError if KV_TRANSFER needs what the GPU does not
    support."""
    if device is None:
        return None, ()
    try:
        return device.digests, device.share()
    except OSError as error:
        if config.kv_transfer != AUTO:
            raise ConfigError(
                f"KV_TRANSFER is {config.kv_transfer}, but the KV cache cannot be shared: {error}"
            ) from None
        log.info("blocks are sent over TCP, because the KV cache cannot be shared: %s", error)
        return None, ()


def _transfer_of(config: Config) -> str:
    """Return how blocks are transferred if not over TCP."""
    return NIXL if config.kv_transfer == NIXL else CUDA_IPC


def identity(config: Config, fingerprint: int = 0) -> Mapping[str, str]:
    """Return what two instances must have in common for their blocks to be equal: to the last bit on CPUs and with
    BATCH_INVARIANT=1, if the numbers of ranks are equal as well. `config` has a device. `fingerprint` is that of a
    replica, see `engine.executors.fingerprint`; prefill and decode instances may differ in it."""
    model = model_hash_of_any_ranks(config.graph_path)
    of_model = "the model (hash of config.json, which depends on weights, DTYPE and QUANT_TYPE)"
    return {
        "the protocol version": str(PROTOCOL),
        of_model: model,
        "the device (DEVICE, CPU_ISA)": _arithmetic(config),
        "the fingerprint": f"{fingerprint:012x}",
    }


def _arithmetic(config: Config) -> str:
    """Return a description of the device in which two devices differ if their results must not be mixed."""
    if config.device == CPU:
        from engine.ops.cpu import cpu_isa

        return f"{CPU} with {cpu_isa()}"
    if not config.batch_invariant:
        return config.device
    import torch

    return f"{torch.cuda.get_device_name()} with BATCH_INVARIANT=1"


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
