"""Settings: prefill and decode on separate instances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from engine.settings.processes import DEFAULT_LOG_DIR, default_run_path
from engine.settings.replicas import addresses_of
from engine.settings.setting import port, setting

MIXED, PREFILL, DECODE, SCHEDULER = ROLES = ("mixed", "prefill", "decode", "scheduler")
AUTO, TCP, CUDA_IPC, NIXL = TRANSFERS = ("auto", "tcp", "cuda_ipc", "nixl")
MOONCAKE = (
    "Mooncake is not supported, because NIXL transfers over the same networks, needs no libraries of the system and"
    " reports a lost instance sooner; use nixl"
)
DEFAULT_HTTP_PORTS = {PREFILL: 9955, DECODE: 9965, SCHEDULER: 9975}
# Ports of an instance that are not set: its HTTP port plus this. Other instances derive them in the same way.
PORT_OFFSETS = {
    "service_grpc_port": 100,
    "health_http_port": 200,
    "metrics_http_port": 300,
    "engine_worker_queue_port": 400,
}


@dataclass(frozen=True)
class DisaggregationSettings:
    splitwise_role: str = setting(
        MIXED,
        "SPLITWISE_ROLE",
        "[role](machines.md#prefill-and-decode-instances) of this instance; mixed: it computes prompts and answers",
        choices=ROLES,
    )
    innode_prefill_ports: str = setting(
        "",
        "INNODE_PREFILL_PORTS",
        "of a decode instance: the ENGINE_WORKER_QUEUE_PORT of prefill instances on this machine, `7013,7023`",
    )
    prefill_instances: str = setting(
        "",
        "PREFILL_INSTANCES",
        "of a decode instance: the prefill instances of other machines, `host:port`, with their"
        " ENGINE_WORKER_QUEUE_PORT",
    )
    engine_worker_queue_port: int = port(
        0,
        "ENGINE_WORKER_QUEUE_PORT",
        "where a prefill instance takes prompts and serves KV blocks; a mixed server uses it as SERVICE_GRPC_PORT; 0:"
        " none",
        minimum=0,
    )
    kv_transfer: str = setting(
        AUTO,
        "KV_TRANSFER",
        "how KV blocks are [transferred](machines.md#transfers-between-gpus); auto: from GPU to GPU between"
        " instances of one host, otherwise over TCP; nixl: also over InfiniBand and RoCE",
        choices=TRANSFERS,
        refused={"mooncake": MOONCAKE},
    )
    remote_prefill_min_tokens: int = setting(
        512,
        "REMOTE_PREFILL_MIN_TOKENS",
        "a decode instance, or a replica with REPLICA_CACHE_PORT, computes prompts by itself of which fewer tokens are"
        " not in its prefix cache",
        minimum=1,
    )
    peer_token: str = setting(
        "", "PEER_TOKEN", "by which instances recognize each other", is_shown=False, internal=True
    )

    @property
    def prefill_addresses(self) -> list[tuple[str, int]]:
        """Return host and port of each prefill instance. Raises ConfigError."""
        found = addresses_of("PREFILL_INSTANCES", self.prefill_instances, "the ENGINE_WORKER_QUEUE_PORT")
        for text in filter(None, (part.strip() for part in self.innode_prefill_ports.split(","))):
            if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16):
                raise ConfigError(f"INNODE_PREFILL_PORTS has {text!r}, it must be ports with commas between them")
            found.append(("127.0.0.1", int(text)))
        return found

    def check_disaggregation(self) -> None:
        role, addresses = self.splitwise_role, self.prefill_addresses
        if role == DECODE and not addresses:
            raise ConfigError("SPLITWISE_ROLE is decode, it needs INNODE_PREFILL_PORTS or PREFILL_INSTANCES")
        if role != DECODE and addresses:
            name = "INNODE_PREFILL_PORTS" if self.innode_prefill_ports else "PREFILL_INSTANCES"
            raise ConfigError(f"{name} is for SPLITWISE_ROLE=decode, SPLITWISE_ROLE is {role}")
        if role == SCHEDULER and not getattr(self, "replicas", ""):
            raise ConfigError("SPLITWISE_ROLE is scheduler, it needs REPLICAS, the decode instances")
        if role in (PREFILL, DECODE):
            self._check_transfer(f"SPLITWISE_ROLE={role}")
        if port := getattr(self, "replica_cache_port", 0):
            if role != MIXED or self.kv_transfer == NIXL:
                raise ConfigError(
                    f"REPLICA_CACHE_PORT is {port}, it is for SPLITWISE_ROLE=mixed without KV_TRANSFER=nixl; they are"
                    f" {role} and {self.kv_transfer}"
                )
            self._check_transfer(f"REPLICA_CACHE_PORT={port}")

    def _check_transfer(self, where: str) -> None:
        """Raise ConfigError if a setting has a value with which blocks cannot be transferred."""
        for name, needed, why in (
            ("MP_NNODE", 1, "an instance is one machine"),
            ("DATA_PARALLEL_SIZE", 1, "start more instances"),
            ("ENABLE_PREFIX_CACHING", True, "blocks are found by their hashes"),
            ("SWAP_SPACE", 0, "blocks in the host's memory cannot be transferred"),
        ):
            value = getattr(self, name.lower(), needed)
            if value != needed:
                raise ConfigError(f"{name} is {value:g}, it must be {needed:g} with {where}: {why}")
        if self.kv_transfer == NIXL and getattr(self, "tls_cert_file", None):
            raise ConfigError(
                "KV_TRANSFER is nixl, which does not encrypt blocks, and TLS_CERT_FILE is set; set only one"
            )


def fill_in(values: dict[str, Any]) -> None:
    """Add ports and folders to the settings that are given, so that several instances can run on one machine. Raises
    ConfigError."""
    role = values.get("splitwise_role", MIXED)
    if role == MIXED:
        if shared := values.get("engine_worker_queue_port"):
            values.setdefault("service_grpc_port", shared)
        return
    base = values.setdefault("service_http_port", DEFAULT_HTTP_PORTS[role])
    if not 0 < base < (1 << 16) - max(PORT_OFFSETS.values()):
        raise ConfigError(f"SERVICE_HTTP_PORT is {base}, ports up to {max(PORT_OFFSETS.values())} above it are used")
    for name, offset in PORT_OFFSETS.items():
        values.setdefault(name, base + offset)
    if "log_dir" not in values:
        values.setdefault("run_dir", f"{default_run_path()}-{role}-{base}")
        values["log_dir"] = f"{DEFAULT_LOG_DIR}-{role}-{base}"
