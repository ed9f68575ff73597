"""The supervisor's process, which `start_server` starts or becomes: `python -m server_scripts.supervise`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine.log import configure
from engine.settings.config import Config
from server_scripts.console import Console
from server_scripts.housekeeping import Housekeeper
from server_scripts.ports import ports_of
from server_scripts.prober import Prober, Probes
from server_scripts.processes import all_specs
from server_scripts.progress import Progress, Told
from server_scripts.run_dir import Process, RunDir, State
from server_scripts.shutdown import shut_down, stop_timeout_s
from server_scripts.summary import summary
from server_scripts.supervisor import Limits, StartFailed, Supervisor, become_subreaper
from server_scripts.triton import TritonError
from server_scripts.wake import Wake

log = logging.getLogger("supervisor")

LAST_WORDS_S = 2.0  # for a terminal to show them


def new_state(config: Config, run_dir: RunDir, model: str, phase: str) -> State:
    me = Process.of("supervisor", os.getpid())
    assert me
    return State(
        phase=phase,
        supervisor=me,
        since=time.time(),
        model=model,
        host=config.service_host,
        ports={name: port for name, (_, port) in ports_of(config).items()},
        log_dir=str(config.log_path),
        shm_prefix=run_dir.shm_prefix,
        stop_timeout_s=stop_timeout_s(config.drain_timeout_s),
    )


def make_probes(config: Config) -> Callable[[], Probes]:
    def make() -> Probes:
        from server_scripts import probe  # loads gRPC, which takes a moment

        return probe.Probes(config)

    return make


def engine_is_busy(port: int) -> bool:
    from server_scripts import engine_probe  # loads ZeroMQ

    return engine_probe.is_busy(port)


def run(config: Config, given: argparse.Namespace, told: Told) -> int:
    run_dir = RunDir(config.run_path)
    try:
        specs = all_specs(config, given.graph_dir, given.served_name, run_dir)
    except TritonError as error:
        told(f"failed: {error}")
        run_dir.clean_up(run_dir.shm_prefix)
        return 1
    wake = Wake()
    housekeeper = Housekeeper(config, run_dir, given.report_fd is None and config.output_log_to_console)
    supervisor = Supervisor(
        specs=specs,
        run_dir=run_dir,
        state=new_state(config, run_dir, given.served_name, "starting"),
        limits=Limits(config.start_timeout_s, config.drain_timeout_s, config.check_health_interval_s),
        prober=Prober(make_probes(config), wake.set),
        wake=wake,
        engine_is_busy=lambda: engine_is_busy(config.inter_proc_port),
        on_tick=housekeeper.tend,
    )
    return live(supervisor, told)


def live(supervisor: Supervisor, told: Told) -> int:
    """0 after a stop signal; 1 when the server did not become ready, with the reason told."""
    become_subreaper()
    supervisor.install_signals()
    progress = Progress(supervisor, told)
    try:
        supervisor.bring_up(progress)
        if supervisor.state.phase == "ready":
            told(summary(supervisor.state))
            told.close()
            supervisor.watch()
        return 0
    except StartFailed as failure:
        log.error("start failed: %s", failure)
        progress.failed(str(failure))
        return 1
    except BrokenPipeError:
        log.error("start_server has gone before the server was ready")
        return 1
    finally:
        shut_down(supervisor)
        supervisor.on_tick()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m server_scripts.supervise", description=__doc__)
    parser.add_argument("--graph-dir", type=Path, required=True, help="exported model")
    parser.add_argument("--served-name", required=True, help="the model's name for clients")
    parser.add_argument("--lock-fd", type=int, required=True, help="holds the lock of the run directory")
    parser.add_argument("--report-fd", type=int, help="where start_server reads; standard output without")
    parser.add_argument("--started", type=float, default=time.monotonic(), help="monotonic seconds")
    return parser.parse_args()


def main() -> int:
    given = parse_arguments()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a server that is still starting is no error
    config = Config.from_env()
    os.set_inheritable(given.lock_fd, False)  # the lock is ours alone: it goes when we go
    if given.report_fd is not None:
        os.set_inheritable(given.report_fd, False)
        configure(config.log_level, sys.stdout)
        return run(config, given, Told(given.report_fd, given.started))
    sys.stdout = console = Console(sys.stdout.fileno())
    configure(config.log_level, console)
    try:
        return run(config, given, Told(None, given.started))
    finally:
        console.finish(LAST_WORDS_S)


if __name__ == "__main__":
    sys.exit(main())
