"""`start_server [model_name] [--foreground]`: exit status 0 when the server answers a request through every port.

1: it will not, or a server runs already; 2: a setting is wrong; 128 + n: ended by signal n. Settings are environment
variables, see `python -m engine.settings.config`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from engine.errors import ConfigError
from engine.settings.config import Config
from engine.settings.unused import likely_misspelt, settings_without_effect
from server_scripts import logs, ports
from server_scripts.child import ROOT
from server_scripts.model_source import ModelUnavailable, export_if_needed, find_source
from server_scripts.processes import log_paths
from server_scripts.progress import NUM_LAST_LINES, Told
from server_scripts.run_dir import RunDir, make_folder
from server_scripts.stop import kill_all
from server_scripts.summary import summary
from server_scripts.supervise import new_state
from server_scripts.triton import TritonError, find_tritonserver

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked to stop; no `except Exception` may swallow it."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def main() -> int:
    given = parse_arguments()
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupt)
    told = Told(None, time.monotonic())
    try:
        return start(given, told)
    except ConfigError as error:
        print(f"start_server: {error}", file=sys.stderr)
        return 2
    except (ModelUnavailable, TritonError, OSError) as error:
        told(f"failed: {error}")
        return 1
    except Interrupted as interrupted:
        told("interrupted, nothing is left running")
        os._exit(128 + interrupted.number)  # at a usual exit threads that wait for a model's server are waited for


def start(given: argparse.Namespace, told: Told) -> int:
    os.environ.update(absolute_paths(Config.from_env()))  # children run in another folder
    config = Config.from_env()
    run_dir = RunDir(config.run_path)
    lock = run_dir.lock()
    if lock is None:
        return say_what_runs(run_dir)
    try:
        prepare(config, run_dir)
        for sentence in [*likely_misspelt(), *settings_without_effect()]:
            told(f"note: {sentence}")
        source = find_source(config, given.model_name or config.model_name, told)
        told(f"model {source.path}")
        graph_dir = export_if_needed(config, source, told)
        if given.foreground:
            become_supervisor(graph_dir, source.label, lock, told)
        return start_detached(config, run_dir, supervisor_command(graph_dir, source.label, lock, told), lock)
    finally:
        if (state := run_dir.read_state()) and state.supervisor.pid == os.getpid():  # the supervisor's is not ours
            run_dir.clean_up(run_dir.shm_prefix)


def prepare(config: Config, run_dir: RunDir) -> None:
    """Checks what can be checked at once. What an earlier server of this run directory has left behind goes."""
    if state := run_dir.read_state():  # its supervisor was killed, as we have the lock
        kill_all(state)
    find_tritonserver()
    if taken := ports.problems(config):
        raise ConfigError("\nstart_server: ".join(taken))
    make_folder("FD_LOG_DIR", config.log_path)
    for path in log_paths(config).values():
        logs.rotate(path, config.log_backup_count)
    run_dir.clean_up(run_dir.shm_prefix)
    run_dir.write_state(new_state(config, run_dir, config.model_name or config.model_dir, "preparing"))


def say_what_runs(run_dir: RunDir) -> int:
    state = run_dir.read_state()
    print("start_server: a server runs already" + ("" if state else f", it has locked {run_dir.path}"))
    if state:
        print("  " + summary(state).replace("\n", "\n  "))
    return 1


def supervisor_command(graph_dir: Path, label: str, lock: int, told: Told) -> list[str]:
    command = [sys.executable, "-m", "server_scripts.supervise", f"--graph-dir={graph_dir}", f"--served-name={label}"]
    return [*command, f"--lock-fd={lock}", f"--started={told.started}"]


def become_supervisor(graph_dir: Path, label: str, lock: int, told: Told) -> NoReturn:
    """In a container this is process 1 and stays it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # one that comes now waits for the supervisor
    os.set_inheritable(lock, True)
    os.chdir(ROOT)
    os.execv(sys.executable, supervisor_command(graph_dir, label, lock, told))


def start_detached(config: Config, run_dir: RunDir, command: list[str], lock: int) -> int:
    """Reads what the supervisor has to say until it closes the pipe: when it is ready, or has failed."""
    read_fd, write_fd = os.pipe()
    with log_paths(config)["supervisor"].open("ab") as log:
        supervisor = subprocess.Popen(
            [*command, f"--report-fd={write_fd}"],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(lock, write_fd),
            start_new_session=True,
        )
    os.close(write_fd)
    text = ""
    try:
        with os.fdopen(read_fd) as lines:
            for line in lines:
                print(line, end="", flush=True)
                text += line
        state = run_dir.read_state()
        if state and state.phase == "ready" and state.supervisor.pid == supervisor.pid:
            supervisor.returncode = 0  # it goes on without us
            return 0
        status = supervisor.wait()
    except Interrupted:
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: supervisor.terminate())  # the second time it insists
        supervisor.terminate()
        supervisor.wait()
        raise
    path = log_paths(config)["supervisor"]
    print(f"start_server: the server has ended, see {path}", file=sys.stderr)
    if " failed: " not in text:  # it could not say why
        print("\n".join(f"  {line}" for line in logs.tail(path, NUM_LAST_LINES)), file=sys.stderr)
    return status if status > 0 else 1


def absolute_paths(config: Config) -> dict[str, str]:
    paths = {"RUN_DIR": config.run_path, "FD_LOG_DIR": config.log_path, "MODEL_DIR": Path(config.model_dir)}
    paths["EXPORT_CACHE_DIR"] = Path(config.export_cache_dir)
    return {name: str(path.expanduser().absolute()) for name, path in paths.items()}


def _interrupt(number: int, _frame: object) -> NoReturn:
    for other in STOP_SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # another one must not cut short how this one is answered
    raise Interrupted(number)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="start_server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_name", nargs="?", help="model to fetch into MODEL_DIR; default: MODEL_DIR is the model")
    parser.add_argument("--foreground", action="store_true", help="stay, and stop the server when asked to end")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
