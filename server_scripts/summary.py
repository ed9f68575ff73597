"""Says in a few lines which server runs and where it answers."""

from __future__ import annotations

import time

from engine.address import in_url
from server_scripts.ports import connect_host
from server_scripts.run_dir import State

WHAT = {
    "SERVICE_HTTP_PORT": ("HTTP", "http://{host}:{port}/v1/chat/completions"),
    "SERVICE_GRPC_PORT": ("gRPC", "{host}:{port}, Triton model `model`"),
    "HEALTH_HTTP_PORT": ("health", "http://{host}:{port}/v2/health/ready"),
    "METRICS_HTTP_PORT": ("metrics", "http://{host}:{port}/metrics"),
}


def summary(state: State) -> str:
    host = in_url(connect_host(state.host))
    lines = [f"{state.model} is {state.phase}, pid {state.supervisor.pid}, since {time.ctime(state.since)}"]
    for name, (what, form) in WHAT.items():
        if name in state.ports:
            lines.append(f"{what:<8} {form.format(host=host, port=state.ports[name])}")
    return "\n".join([*lines, f"{'logs':<8} {state.log_dir}", f"{'stop':<8} stop_server"])
