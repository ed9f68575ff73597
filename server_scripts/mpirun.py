"""Checks of how mpirun has started this command: once on each machine."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import ConfigError
from engine.settings.config import Config
from engine.settings.disaggregation import MIXED

WORLD, LOCAL, LOCAL_RANK = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"


def check_mpirun(config: Config, environ: Mapping[str, str]) -> str:
    """Return a note for the user, or an empty text. Raises ConfigError if mpirun has not started the command once on
    each machine."""
    num_started, num_here = int(environ.get(WORLD, "1")), int(environ.get(LOCAL, "1"))
    num_hosts, problem = config.machines.num_hosts, ""
    if num_here > 1:
        problem = f"mpirun has started this command {num_here} times on this machine"
    elif WORLD in environ and 1 < num_hosts != num_started:
        problem = f"mpirun has started this command on {num_started} machines, but MP_NNODE is {num_hosts}"
    if problem:
        raise ConfigError(
            f"{problem}; give mpirun a file with the line `ADDRESS slots=1` for each machine: mpirun --hostfile FILE"
            " start_server"
        )
    if num_hosts == 1 < num_started and not config.replicas and config.splitwise_role == MIXED:
        return (
            f"mpirun has started this command on {num_started} machines, but MP_NNODE is 1 and REPLICAS is not set, so"
            " this machine serves the model by itself; variables must be set on each machine"
        )
    return ""


def is_repetition(environ: Mapping[str, str]) -> bool:
    """Return whether mpirun has also started the command before on this machine, where the first one prints errors."""
    return environ.get(LOCAL_RANK, "0") != "0"
