"""Makes the engine loop that of a prefill or decode instance, as SPLITWISE_ROLE says."""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from engine.core.loop import EngineLoop
from engine.core.prefill_jobs import PrefillJobs
from engine.core.remote_prefill import RemotePrefill
from engine.errors import ConfigError
from engine.executors.rank_blocks import BlockAccess, DeviceBlocks, SharedCaches
from engine.exporting.files import model_hash_of_any_ranks
from engine.exporting.manifest import Manifest
from engine.settings.config import Config
from engine.settings.device import CPU, with_device
from engine.settings.disaggregation import AUTO, CUDA_IPC, DECODE, NIXL, PREFILL, TCP
from engine.settings.tls import server_context
from engine.transfer.client import PrefillClient, PulledBlocks
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
    device = device_of(config, access)
    model = Manifest.read(config.graph_path)
    if role == PREFILL:
        loop.jobs = PrefillJobs(loop.scheduler, wake, on_first_prompt)
        served = ServedBlocks(
            loop.jobs,
            access.read_block,
            identity(config),
            model.vocab_size,
            model.max_seq_len,
            *shared_by(config, device),
            BlockLayout.of(model),
            _transfer_of(config),
        )
        address = config.service_host, config.engine_worker_queue_port
        try:
            server = PrefillServer(address, served, config.peer_token, server_context(config))
        except OSError as error:
            raise ConfigError(f"ENGINE_WORKER_QUEUE_PORT is {address[1]}, which cannot be used: {error}") from None
        log.info("prompts of decode instances are computed, port %d", server.port)
    elif role == DECODE:
        check_hosts(config)
        transfer, needs_device = _transfer_of(config), config.kv_transfer in (CUDA_IPC, NIXL)
        layout = BlockLayout.of(model)
        ours = device, needs_device, layout, transfer
        pulled = PulledBlocks(access.write_block, layout.block_bytes, identity(config), *ours)
        try:
            client = PrefillClient(
                config.prefill_addresses, pulled, config.peer_token, lambda host: tls_of(config, host)
            )
        except OSError as error:
            raise ConfigError(f"KV_TRANSFER is {transfer}, but there is no memory to read blocks to: {error}") from None
        refusals = client.refusals(ANSWER_WITHIN_S)
        if refusals and not config.engine_is_back:  # an engine that has served before computes prompts itself
            raise ConfigError("; ".join(refusals))
        loop.remote = RemotePrefill(loop.scheduler, client, config.remote_prefill_min_tokens)


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


def identity(config: Config) -> Mapping[str, str]:
    """Return what two instances must have in common for their blocks to be equal: to the last bit on CPUs and with
    BATCH_INVARIANT=1, if the numbers of ranks are equal as well. `config` has a device."""
    model = model_hash_of_any_ranks(config.graph_path)
    of_model = "the model (hash of config.json, which depends on weights, DTYPE and QUANT_TYPE)"
    return {"the protocol version": str(PROTOCOL), of_model: model, "the device (DEVICE, CPU_ISA)": _arithmetic(config)}


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
