"""Settings: the other servers of the same model, between which requests are distributed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.settings.setting import port, setting

ADDRESS = re.compile(r"(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class ReplicaSettings:
    replicas: str = setting(
        "",
        "REPLICAS",
        "gRPC addresses of all servers of this model, `host:port,host:port`, between which requests are"
        " [distributed](machines.md#replicas); a name may have several addresses; this server may be among them",
    )

    replica_cache_port: int = port(
        0,
        "REPLICA_CACHE_PORT",
        "where a server with REPLICAS sends [cached KV blocks](machines.md#prefixes-of-other-replicas) to the others;"
        " 0: blocks are not shared",
        minimum=0,
    )

    @property
    def replica_addresses(self) -> list[tuple[str, int]]:
        """Return host and port of each item of REPLICAS. Raises ConfigError."""
        return addresses_of("REPLICAS", self.replicas, "the SERVICE_GRPC_PORT")

    def check_replicas(self) -> None:
        workers = getattr(self, "push_mode_http_workers", 1)
        if self.replica_addresses and workers > 1:
            raise ConfigError(f"PUSH_MODE_HTTP_WORKERS is {workers}, it must be 1 with REPLICAS; start more servers")
        if self.replica_cache_port and not self.replicas:
            raise ConfigError(f"REPLICA_CACHE_PORT is {self.replica_cache_port}, it needs REPLICAS")


def addresses_of(name: str, value: str, port: str) -> list[tuple[str, int]]:
    """Return host and port of each item of a setting. `port` says which one it must be. Raises ConfigError."""
    found = []
    for text in filter(None, (part.strip() for part in value.split(","))):
        match = ADDRESS.fullmatch(text)
        if not match or not 0 < int(match["port"]) < 1 << 16:
            raise ConfigError(f"{name} has {text!r}, it must be host:port, with {port} of the server")
        found.append((match["ipv6"] or match["host"], int(match["port"])))
    return found
