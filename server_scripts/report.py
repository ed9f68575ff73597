"""Messages for the user who starts a server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.address import connect_host, in_url
from engine.log import printable
from engine.settings.foreign.table import notes_on_variables
from engine.settings.unused import likely_misspelt
from server_scripts import logs
from server_scripts.processes import ENGINE, GATEWAY, TRITONSERVER
from server_scripts.run_dir import ServerState, stop_command

if TYPE_CHECKING:  # they take half as long to import as the rest of start_server
    from server_scripts.child import Child
    from server_scripts.supervisor import StartFailed, Supervisor

NEWS_EVERY_S = 10.0  # repeat the current step, because silence looks like a hang
NUM_LAST_LINES = 15
ADDRESSES = {
    "SERVICE_HTTP_PORT": ("HTTP", "{scheme}://{host}:{port}/v1/chat/completions"),
    "TRITON_HTTP_PORT": ("Triton", "{scheme}://{host}:{port}/v2/models/model"),
    "SERVICE_GRPC_PORT": ("gRPC", "{host}:{port}, Triton model `model`"),
    "HEALTH_HTTP_PORT": ("health", "http://{host}:{port}/v2/health/ready"),
    "METRICS_HTTP_PORT": ("metrics", "http://{host}:{port}/metrics"),
}


class Reporter:
    """Prints lines with the seconds since the start. A closed terminal or a full disk does not stop the server."""

    def __init__(self, fd: int = 1):
        self.fd = fd
        self._started = time.monotonic()

    def __call__(self, text: str) -> None:
        first, *others = printable(text).splitlines()
        lines = [f"[{time.monotonic() - self._started:6.1f} s] {first}", *(f"           {line}" for line in others)]
        try:
            os.write(self.fd, ("\n".join(lines) + "\n").encode(errors="replace"))
        except OSError:
            pass


class StartProgress:
    """Reports the progress of a start.

    It is called in every iteration and prints when the step changes or after some silence.
    """

    def __init__(self, supervisor: Supervisor, report: Callable[[str], None]):
        self._supervisor = supervisor
        self._report = report
        self._text = ""
        self._reported_at = 0.0

    def __call__(self) -> None:
        text, awaited = self._step()
        if text != self._text:
            self._text = text
        elif time.monotonic() - self._reported_at > NEWS_EVERY_S:
            text = "\n".join([text, *(line[:160] for line in self._last_lines(awaited, 1))])
        else:
            return
        self._reported_at = time.monotonic()
        self._report(text)

    @property
    def waits_for_machines(self) -> bool:
        """Return whether this is the master, and it lacks nothing but other machines."""
        state, machines = self._supervisor.seen.state or {}, self._supervisor.config.machines
        return machines.num_hosts > 1 and machines.is_master and "waits for" in state.get("reason", "")

    def failed(self, failure: StartFailed) -> None:
        """Report the reason of a failed start, with the last log lines of the process that seems to be at fault."""
        guilty = failure.child or self._step()[1]
        lines = [f"failed: {failure}"]
        if guilty:
            lines.append(f"the end of {guilty.spec.log_path}:")
            lines += [f"  {line}" for line in self._last_lines(guilty, NUM_LAST_LINES)]
        self._report("\n".join(lines))

    def _step(self) -> tuple[str, Child | None]:
        """Return the current step of the start and the process that it depends on."""
        seen, named = self._supervisor.seen, self._supervisor.named
        if named(TRITONSERVER) is None:  # a scheduler
            return (seen.state or {}).get("reason") or "starting the gateway", named(f"{GATEWAY}-0")
        if seen.state is None:
            return "starting the engine and tritonserver", named(TRITONSERVER)
        if not seen.state.get("ready"):
            return f"tritonserver is up, {seen.state.get('reason') or 'its model is not ready'}", named(ENGINE)
        return "the engine is ready, sending real requests", named(ENGINE)

    def _last_lines(self, child: Child | None, num_lines: int) -> list[str]:
        return logs.tail(child.spec.log_path, num_lines) if child else []


def report_useless_variables(report: Callable[[str], None]) -> None:
    """Report environment variables that have no effect: misspelt ones, and those of other servers."""
    for sentence in [*likely_misspelt(), *notes_on_variables()]:
        report(f"note: {sentence}")


def missing_instances(supervisor: Supervisor) -> str:
    """Return how many prefill instances a decode instance lacks, or an empty text."""
    num_all, state = len(supervisor.config.prefill_addresses), supervisor.seen.state or {}
    if (num_connected := state.get("num_prefill_instances", 0)) >= num_all:
        return ""
    return (
        f"note: {num_connected} of {num_all} prefill instances are connected; infer_server.log says why. While none is,"
        " this instance computes all prompts itself"
    )


def summary(state: ServerState, run_path: Path) -> str:
    """Return a description of the running server with this run directory, its addresses, and how to stop it."""
    host = in_url(connect_host(state.host))
    lines = [f"{state.model} is {state.phase}, pid {state.supervisor.pid}, since {time.ctime(state.since)}"]
    for name, (what, template) in ADDRESSES.items():
        if name in state.ports:
            lines.append(f"{what:<8} {template.format(scheme=state.scheme, host=host, port=state.ports[name])}")
    stop = stop_command(run_path, state.log_dir)
    return printable("\n".join([*lines, f"{'logs':<8} {state.log_dir}", f"{'stop':<8} {stop}"]))
