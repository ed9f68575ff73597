"""Settings: where the server listens."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.settings.setting import port, setting


@dataclass(frozen=True)
class PortSettings:
    health_http_port: int = port(
        8110,
        "HEALTH_HTTP_PORT",
        "health over HTTP: `/v2/health/live`, `/v2/health/ready`, `/v2/health/started`",
        "HTTP_PORT",
        "CACHE_QUEUE_PORT",
    )
    service_grpc_port: int = port(8811, "SERVICE_GRPC_PORT", "requests over Triton's gRPC", "GRPC_PORT")
    metrics_http_port: int = port(8722, "METRICS_HTTP_PORT", "Triton's Prometheus metrics, `/metrics`", "METRICS_PORT")
    service_http_port: int = port(
        9965, "SERVICE_HTTP_PORT", "HTTP requests; -1: gRPC only", "PUSH_MODE_HTTP_PORT", minimum=-1
    )
    triton_http_port: int = port(
        -1,
        "TRITON_HTTP_PORT",
        "a port, such as Triton's 8000, for what SERVICE_HTTP_PORT has, `/v2` among it; -1: none",
        minimum=-1,
    )
    inter_node_port: int = port(56667, "INTER_NODE_PORT", "between the engines of several machines, on HOST_IP")
    service_host: str = setting("0.0.0.0", "SERVICE_HOST", "address the gRPC, HTTP, health and metrics ports listen on")

    @property
    def http_ports(self) -> list[int]:
        """Return the ports on which the gateway serves HTTP."""
        return [number for number in (self.service_http_port, self.triton_http_port) if number > 0]

    def check_http_port(self) -> None:
        for env, number in (("SERVICE_HTTP_PORT", self.service_http_port), ("TRITON_HTTP_PORT", self.triton_http_port)):
            if number == 0:
                raise ConfigError(f"{env} is 0, it must be a port from 1 to 65535, or -1 for none")
