"""Processes of a server: their commands, environments and log files."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from engine.settings.config import Config
from engine.settings.device import may_be_gpu
from engine.settings.disaggregation import MIXED, SCHEDULER
from engine.settings.images import IMAGE_BODY_BYTES
from engine.settings.keys import replica_token
from engine.settings.processes import ENGINE_PROGRESS_FILE, ENGINE_SUSPECT_FILE, TRITON_FOLDER, of_engine
from server_scripts import triton
from server_scripts.child import ChildSpec, without_secrets
from server_scripts.run_dir import RunDir

ENGINE, TRITONSERVER, GATEWAY, HEALTH = "engine", "tritonserver", "gateway", "health"

PRIVATE = [sys.executable, "-I", "-S", str(Path(__file__).with_name("exec_private.py"))]

# The file names are those of the predecessor, so that existing scripts keep working.
LOG_NAMES = {
    ENGINE: "infer_server.log",
    TRITONSERVER: "server.log",
    GATEWAY: "http_server.log",
    HEALTH: "health_http.log",
    "supervisor": "console.log",
}

# Unread answers are buffered in tritonserver and incomplete requests in the gateway. Without these malloc settings
# the processes would never return that memory.
MEMORY_DEFAULTS = {"MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "65536"}


def log_paths(config: Config) -> dict[str, Path]:
    """Return the log file of each process."""
    more = range(1, config.data_parallel_size)
    names = LOG_NAMES | {of_engine(ENGINE, index): f"infer_server-{index}.log" for index in more}
    return {name: config.log_path / file_name for name, file_name in names.items()}


def kind_of(name: str) -> str:
    """Return the kind of the process with this name, which is ENGINE for `engine` and `engine-1`."""
    return name.partition("-")[0]


def all_specs(config: Config, graph_dir: Path, served_name: str, run_dir: RunDir) -> list[ChildSpec]:
    """Return the specs of all processes in the order in which they start. Raise TritonError."""
    from engine.images.reader import processor_of  # with numpy, which must not be loaded before start_server forks

    environ = {**without_secrets(os.environ), "PYTHONUNBUFFERED": "1"}
    environ |= {"GRAPH_DIR": str(graph_dir), "SERVED_MODEL_NAME": served_name}
    if not environ.get("MAX_BODY_BYTES") and processor_of(config, graph_dir):
        environ["MAX_BODY_BYTES"] = str(IMAGE_BODY_BYTES)
    if config.mp_nnode > 1:
        environ["HOST_IP"] = config.machines.ips[config.machines.host]  # also while the address is missing
    logs, python = log_paths(config), [sys.executable, "-m"]
    specs: list[ChildSpec] = []
    if config.splitwise_role != SCHEDULER:
        specs += [engine_spec(config, environ, index) for index in range(config.data_parallel_size)]
        specs.append(triton_spec(config, environ, run_dir, logs[TRITONSERVER]))
    for index in range(config.push_mode_http_workers):
        command = [*python, "gateway", f"--index={index}"]
        env = {**MEMORY_DEFAULTS, **environ, "API_KEY": config.api_key, "API_KEYS": config.api_keys}
        specs.append(ChildSpec(f"{GATEWAY}-{index}", command, env, logs[GATEWAY]))
    specs.append(ChildSpec(HEALTH, [*python, "gateway.health"], with_peer_token(config, environ), logs[HEALTH]))
    return specs


def with_peer_token(config: Config, environ: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process that talks to other instances, but must not know the keys."""
    is_alone = config.splitwise_role == MIXED and not config.replica_cache_port
    return environ if is_alone else {**environ, "PEER_TOKEN": replica_token(config.owners)}


def engine_spec(config: Config, environ: dict[str, str], index: int) -> ChildSpec:
    """Return the spec of the engine process with this index."""
    name = of_engine(ENGINE, index)
    return ChildSpec(
        name=name,
        command=[sys.executable, "-m", "engine.process"],
        env={**with_peer_token(config, environ), "ENGINE_INDEX": str(index)},
        log_path=log_paths(config)[name],
        max_crashes=config.engine_max_crashes,
        progress_file=config.engine_path(ENGINE_PROGRESS_FILE, index),
        suspect_file=config.engine_path(ENGINE_SUSPECT_FILE, index),
    )


def triton_spec(config: Config, environ: Mapping[str, str], run_dir: RunDir, log_path: Path) -> ChildSpec:
    """Return the spec of tritonserver, and prepare its folder. Raise TritonError."""
    found, folder = triton.find_tritonserver(), run_dir.path / TRITON_FOLDER
    if not folder.is_dir():  # otherwise a tritonserver that was taken over is running in it
        triton.prepare(found, folder, triton.ROOT / "model_repository")
    watch_gpus = may_be_gpu(config)
    command = [*PRIVATE, *triton.command(found, config, run_dir.shm_prefix, watch_gpus)]
    env = triton.environment(found, folder, {**MEMORY_DEFAULTS, **environ}, watch_gpus)
    return ChildSpec(
        TRITONSERVER, command, env, log_path, cwd=folder, socket=config.triton_page, helper_program=triton.STUB
    )
