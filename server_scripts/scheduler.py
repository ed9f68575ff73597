"""Scheduler instance: a front end without a model, which places requests on decode instances (REPLICAS)."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from engine.settings.disaggregation import DECODE, PORT_OFFSETS, PREFILL
from engine.settings.rank_tables import PORTS, Deployment, read_deployment
from server_scripts.probe import TIMEOUT_S, Probe, ProbeError

CONNECT_WITHIN_S = 0.3


class SchedulerProbe(Probe):
    """Probe of a scheduler, whose state is that of the decode instances."""

    def state(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        try:
            self.check_ready()
        except ProbeError as error:
            return {"ready": False, "reason": f"waiting for a decode instance: {error}", "num_open": 0}
        return {"ready": True, "num_open": 0, "num_labels": 0}

    def check_all_ports(self) -> None:
        self._check_requests()


def check_instances(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if the ports of rank tables are those of other instances than the tables say. Instances that do
    not run yet cannot be checked."""
    deployment = read_deployment(environ)
    if deployment is None:
        return
    for instance, port in deployment.workers():
        is_prefill = accepts(instance.host, port + PORT_OFFSETS["engine_worker_queue_port"])
        is_up = is_prefill or accepts(instance.host, port)
        if is_up and is_prefill != (instance.role == PREFILL):
            found = PREFILL if is_prefill else DECODE
            raise ConfigError(
                f"{PORTS} is {environ[PORTS]!r}, where the {instance} has port {port}, but a {found} instance listens"
                f" there: {order_of(deployment)}"
            )


def order_of(deployment: Deployment) -> str:
    names = "; ".join(str(instance) for instance, _ in deployment.workers())
    return f"the order must be that of the global rank table ({names})"


def accepts(host: str, port: int) -> bool:
    """Return whether something listens on the port. Raises ConfigError for a name that cannot be resolved."""
    try:
        socket.create_connection((host, port), CONNECT_WITHIN_S).close()
        return True
    except socket.gaierror as error:
        raise ConfigError(f"{PORTS}: {host} cannot be resolved: {error.strerror}") from None
    except OSError:
        return False
