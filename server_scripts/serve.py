"""Life of a server in the supervisor's process: settings, model, processes, shutdown. `start_server` calls it."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.errors import ConfigError
from engine.log import configure
from engine.settings.config import Config
from engine.settings.device import check_packages
from engine.settings.disaggregation import SCHEDULER
from engine.settings.processes import TRITON_FOLDER
from engine.settings.tls import server_context
from server_scripts import logs, ports, takeover
from server_scripts.health import HealthMonitor
from server_scripts.model_source import export_if_needed, fetch_draft_model, find_source, source_of_scheduler
from server_scripts.probe import Probe
from server_scripts.processes import all_specs, log_paths
from server_scripts.reload import change_model, release, take_reload_request
from server_scripts.report import Reporter, StartProgress, missing_instances, report_useless_variables, summary
from server_scripts.run_dir import Process, RunDir, ServerState, make_folder
from server_scripts.scheduler import SchedulerProbe
from server_scripts.shutdown import shut_down, stop_timeout_s
from server_scripts.stop import kill_all
from server_scripts.supervisor import TURN_S, TURN_WHILE_STARTING_S, StartFailed, Supervisor
from server_scripts.triton import find_tritonserver

log = logging.getLogger("supervisor")

LOGS_EVERY_S = 5.0
TOUCH_EVERY_S = 3600.0
CONSOLE_FLUSH_S = 2.0  # for the terminal to receive the last lines


def serve(model_name: str, report: Reporter, on_ready: Callable[[], None] | None) -> int:
    """Run a server until it ends.

    Return 0 after a stop signal and 1 if it did not become ready, with the reason reported.

    Without `on_ready` the server is in the foreground: its log is printed, and with OUTPUT_LOG_TO_CONSOLE those of the
    other processes too.
    """
    config = Config.from_env()
    run_dir = RunDir(config.run_path)
    lock = run_dir.lock()  # held by this process alone and released at its end
    if lock is None:
        return report_running_server(run_dir)
    console = None
    orphans, left_running = takeover.find_orphans(run_dir), None
    try:
        prepare(config, run_dir, orphans, model_name)
        log_file = log_paths(config)["supervisor"].open("a", buffering=1)
        configure(config.log_level, log_file)
        if on_ready is None:
            console = logs.LogConsole(console_paths(config), report.fd)
            console.start()
            report.fd = log_file.fileno()
        supervisor = make_supervisor(config, run_dir, model_name, report, orphans)
        orphans = None  # they were taken over or have ended
        return run_until_stopped(supervisor, report, on_ready)
    except Exception:
        left_running = orphans  # a failed start must not end processes that still serve
        raise
    finally:
        if left_running:
            run_dir.write_state(left_running)
        else:
            kill_all(orphans)
            run_dir.clean_up()
        if console:
            report.fd = 1
            console.finish(CONSOLE_FLUSH_S)


def prepare(config: Config, run_dir: RunDir, orphans: ServerState | None, model_name: str) -> None:
    """Check the settings and packages, and prepare the run directory.

    Leftovers of an earlier server are removed, except `orphans`, which may continue to serve. Raise SetupError.
    """
    if config.splitwise_role != SCHEDULER:
        find_tritonserver()
        check_packages(config)
    server_context(config)
    check_call_format(config)
    make_folder("FD_LOG_DIR", config.log_path)
    if orphans:
        run_dir.write_state(replace(orphans, supervisor=current_process()))
    else:
        begin_anew(config, run_dir, model_name)


def check_call_format(config: Config) -> None:
    """Raise ConfigError if a plug-in file for tool calls is wrong, which every gateway worker would load."""
    if config.tool_call_parser.endswith(".py"):
        from gateway.openai.output_syntax import output_syntax_of  # with the gateway, which is not needed otherwise

        output_syntax_of(config)


def begin_anew(config: Config, run_dir: RunDir, model_name: str) -> None:
    kill_all(run_dir.read_state())
    if taken := ports.problems(config):
        raise ConfigError("\n".join(taken))
    for path in log_paths(config).values():
        logs.rotate(path, config.log_backup_count)
    run_dir.clean_up()
    shutil.rmtree(run_dir.path / TRITON_FOLDER, ignore_errors=True)
    run_dir.write_state(new_state(config, model_name or config.model_name or config.model_dir, "preparing"))


def current_process() -> Process:
    """Return this process, the supervisor."""
    me = Process.of("supervisor", os.getpid())
    assert me
    return me


def new_state(config: Config, model: str, phase: str) -> ServerState:
    """Return the state of a server in its first phase."""
    return ServerState(
        phase=phase,
        supervisor=current_process(),
        since=time.time(),
        model=model,
        host=config.service_host,
        ports={name: port for name, (_, port) in ports.ports_of(config).items()},
        log_dir=str(config.log_path),
        stop_timeout_s=stop_timeout_s(config),
        scheme="https" if config.tls_cert_file else "http",
        settings=takeover.setting_fingerprints(config),
    )


def make_supervisor(
    config: Config, run_dir: RunDir, model_name: str, report: Reporter, orphans: ServerState | None
) -> Supervisor:
    """Return the supervisor of a new server, or of the orphans if they have the same settings and model.

    Raise SetupError.
    """
    report_useless_variables(report)
    is_scheduler = config.splitwise_role == SCHEDULER
    if is_scheduler:
        source = source_of_scheduler(config, model_name or config.model_name)
        graph_dir = source.path
    else:
        source = find_source(config, model_name or config.model_name, report)
        report(f"model {source.path}")
        fetch_draft_model(config, report)
        graph_dir = export_if_needed(config, source, report)
    fingerprint = takeover.fingerprint(config, graph_dir, source.label)
    if orphans and orphans.fingerprint != fingerprint:
        report("what an earlier start_server has left running has other settings or another model: ending it")
        orphans = None
        begin_anew(config, run_dir, model_name)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # connection errors during a start are expected
    supervisor = Supervisor(
        specs=all_specs(config, graph_dir, source.label, run_dir),
        run_dir=run_dir,
        state=replace(new_state(config, source.label, "starting"), fingerprint=fingerprint),
        config=config,
        monitor=HealthMonitor((SchedulerProbe if is_scheduler else Probe)(config)),
        every_turn=Maintenance(config, run_dir),
    )
    if orphans:
        report("taking over what an earlier start_server has left running")
        supervisor.take_over(orphans.processes)
        release(run_dir)
    return supervisor


def run_until_stopped(supervisor: Supervisor, report: Reporter, on_ready: Callable[[], None] | None = None) -> int:
    """Run the server.

    Return 0 after a stop signal, 128 + its number before the server was ready, or 1 if it did not become ready, with
    the reason reported.
    """
    supervisor.adopt_and_listen()
    progress = StartProgress(supervisor, report)

    def tell() -> None:
        nonlocal on_ready
        progress()
        if on_ready and progress.waits_for_machines and not supervisor.config.start_waits_for_machines:
            report(f"{summary(supervisor.state, supervisor.run_dir.path)}\nit goes on waiting for the other machines")
            on_ready()
            on_ready = None

    try:
        supervisor.bring_up(tell)
        is_ready = supervisor.state.phase == "ready"
        if is_ready:
            text = summary(supervisor.state, supervisor.run_dir.path)
            notes = supervisor.config.machines.why_not_served, missing_instances(supervisor)
            report("\n".join(filter(None, [text, *notes])))
            if on_ready:
                on_ready()
            watch(supervisor)
    except StartFailed as failure:
        log.error("start failed: %s", failure)
        progress.failed(failure)
        return 1
    finally:
        shut_down(supervisor)
    if not is_ready:
        report("interrupted, nothing is left running")
        return 128 + supervisor.stop_signal
    return 0


def watch(supervisor: Supervisor) -> None:
    """Supervise the processes and reload the model on request, until a stop signal."""
    while not supervisor.num_stop_signals:
        supervisor.turn(TURN_WHILE_STARTING_S if supervisor.is_triton_coming_back else TURN_S)
        if wanted := take_reload_request(supervisor.run_dir):
            change_model(supervisor, wanted)


class Maintenance:
    """Periodic maintenance: limits the size of logs, and keeps cleaners of /tmp from removing the run directory."""

    def __init__(self, config: Config, run_dir: RunDir):
        self._config = config
        self._run_dir = run_dir
        self._bounded_at = self._touched_at = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        try:
            if now - self._bounded_at > LOGS_EVERY_S:
                self._bounded_at = now
                for path in log_paths(self._config).values():
                    if path.exists() and path.stat().st_size > self._config.log_max_bytes:
                        logs.rotate(path, self._config.log_backup_count, has_writer=True)
            if now - self._touched_at > TOUCH_EVERY_S:
                self._touched_at = now
                self._run_dir.touch_all()
        except OSError as error:
            log.warning("maintenance: %s", error)


def console_paths(config: Config) -> dict[str, Path]:
    """Return the log files that are printed in the foreground."""
    paths = log_paths(config)
    own = {"": paths.pop("supervisor")}
    return own | paths if config.output_log_to_console else own


def report_running_server(run_dir: RunDir) -> int:
    """Print which server holds the lock and return the exit status 1."""
    state = run_dir.read_state()
    if state and state.phase == "stopping":
        print("start_server: a server is stopping, start again when it has stopped")
    else:
        print("start_server: a server is already running" + ("" if state else f", it has locked {run_dir.path}"))
    if state:
        print("  " + summary(state, run_dir.path).replace("\n", "\n  "))
    return 1
