"""Start the server with a model, and return when it has answered a request through every port.

With --foreground it stays in the foreground, with --reload the server that runs changes to another model. With
--dry-run it only prints the memory that a model on this disk needs. Exit status: 0 when the server answers or the model
fits, 1 when it does not or one runs already, 2 when a setting is wrong, 128 + n after signal n.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from engine import __version__
from engine.errors import ConfigError, SetupError
from engine.log import printable
from engine.settings.config import Config
from engine.settings.disaggregation import SCHEDULER
from engine.settings.foreign.rank_table import settings_of_tables
from engine.settings.foreign.table import check_variables
from server_scripts.child import ROOT, describe_exit
from server_scripts.model_source import local_folder
from server_scripts.mpirun import WORLD, check_mpirun, is_repetition
from server_scripts.options import OptionParser
from server_scripts.processes import log_paths
from server_scripts.report import Reporter, report_useless_variables

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1


class Interrupted(BaseException):
    """A signal asked to stop. It is a BaseException, so that `except Exception` does not catch it."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def main() -> int:
    """Run the command and return its exit status."""
    given = parse_arguments()
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupt)
    report = Reporter()
    for note in given.notes:
        report(f"note: {note}")
    if WORLD in os.environ:  # mpirun binds its processes to one core
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the kernel removes cores that a container may not use
    mode = change if given.reload else run if given.foreground else report_sizes if given.dry_run else detach
    try:
        config = read_settings(report)
        name = given.model_name or config.model_name
        return mode(str(local_folder(name, config.model_dir) or name), report)
    except ConfigError as error:
        return print_error(error)
    except (SetupError, OSError) as error:
        report(f"failed: {error}")
        return 1
    except Interrupted as interrupted:
        goes_on = "the server continues the reload" if given.reload else "nothing is left running"
        report(f"interrupted, {goes_on}")
        os._exit(128 + interrupted.number)  # a normal exit would wait for threads that are blocked on a download


def print_error(error: ConfigError) -> int:
    """Print an error of the settings and return the exit status. If mpirun has started several of these commands on
    this machine, only the first one does so; another status of the others would make mpirun end it before."""
    if is_repetition(os.environ):
        return 0
    for line in printable(str(error)).splitlines():
        print(f"start_server: {line}", file=sys.stderr)
    return 2


def read_settings(report: Callable[[str], None]) -> Config:
    """Return the settings, and add those of rank tables and absolute paths to the environment. Raises ConfigError."""
    os.environ.update(settings_of_tables(os.environ))
    check_variables()
    config = Config.from_env()
    if note := check_mpirun(config, os.environ):
        report(f"note: {note}")
    if config.splitwise_role == SCHEDULER:
        from server_scripts.scheduler import check_instances  # imported late, because it imports the probe

        check_instances(os.environ)
    if config.lora_path and not config.lora_path.is_dir():
        raise ConfigError(f"LORA_DIR is {config.lora_dir!r}, there is no such folder")
    os.environ.update(absolute_paths(config))  # because the server runs in another folder
    return config


def run(model_name: str, report: Reporter, on_ready: Callable[[], None] | None = None) -> int:
    """Run the server in this process, which is process 1 in a container."""
    from server_scripts.serve import serve  # imported late: it must not be loaded before `detach` forks

    os.chdir(ROOT)
    return serve(model_name, report, on_ready)


def change(model_name: str, report: Reporter) -> int:
    """Ask the running server to load this model."""
    if Config.from_env().splitwise_role == SCHEDULER:
        raise ConfigError("SPLITWISE_ROLE is scheduler, which has no model: reload those of the other instances")
    from server_scripts.reload_client import reload

    os.chdir(ROOT)
    return reload(model_name, report)


def report_sizes(model_name: str, report: Callable[[str], None]) -> int:
    """Print the memory that the model needs and whether it fits. Return 0 if it does, else 1."""
    from server_scripts.dry_run import dry_run  # imported late, because it imports numpy
    from server_scripts.model_source import find_source
    from server_scripts.ports import wrong_hosts

    config = Config.from_env()
    if model_name and not model_name.startswith("/"):
        raise ConfigError(f"--dry-run needs a folder of this disk with the model's config.json, {model_name} is none")
    if wrong := wrong_hosts(config):
        raise ConfigError("\n".join(wrong))
    report_useless_variables(report)
    lines, fits = dry_run(config, find_source(config, model_name, report).path)
    print("\n".join(lines))
    return 0 if fits else 1


def detach(model_name: str, report: Reporter) -> int:
    """Fork the server, which prints to this terminal until it is ready, and wait for that."""
    ready_fd, write_fd = os.pipe()
    me = os.getpid()
    if pid := os.fork():
        os.close(write_fd)
        return wait_until_ready(pid, ready_fd)
    os.close(ready_fd)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != me:  # the parent was killed before PDEATHSIG was set
        os._exit(1)
    return run(model_name, report, lambda: let_go(write_fd))


def wait_until_ready(pid: int, ready_fd: int) -> int:
    """Wait for the server's process. Return 0 when it is ready, or its exit status."""
    try:
        if os.read(ready_fd, 1):
            return 0  # the server continues without this process
        _, status = os.waitpid(pid, 0)
    except Interrupted as interrupted:
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: os.kill(pid, signal.SIGTERM))  # the second time it insists
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has just ended by itself
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
        return 128 + interrupted.number
    if os.WIFSIGNALED(status):
        print(f"start_server: the server {describe_exit(status)}", file=sys.stderr)
    return max(1, os.waitstatus_to_exitcode(status))


def let_go(write_fd: int) -> None:
    """Detach the server: it no longer ends with start_server, and writes to its log instead of the terminal."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    with log_paths(Config.from_env())["supervisor"].open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.write(write_fd, b"!")
    os.close(write_fd)


def absolute_paths(config: Config) -> dict[str, str]:
    """Return the settings that name files or folders, as absolute paths."""
    paths = {"RUN_DIR": config.run_path, "FD_LOG_DIR": config.log_path, "MODEL_DIR": Path(config.model_dir)}
    paths["EXPORT_CACHE_DIR"] = Path(config.export_cache_dir)
    files = {"TLS_CERT_FILE": config.tls_cert_file, "TLS_KEY_FILE": config.tls_key_file, "API_KEYS": config.api_keys}
    files |= {"LORA_DIR": config.lora_dir}
    if not config.draft_model_name:
        files["SPECULATE_MODEL_PATH"] = config.speculate_model_path
    paths |= {name: Path(text) for name, text in files.items() if text}
    return {name: str(path.expanduser().absolute()) for name, path in paths.items()}


def _nothing(_number: int, _frame: object) -> None:
    """Ignore a signal.

    SIG_IGN is not used because Python reports an error if it is set between a signal and its handler.
    """


def _interrupt(number: int, _frame: object) -> NoReturn:
    for other in STOP_SIGNALS:
        signal.signal(other, _nothing)  # a second signal must not interrupt the reaction to the first
    raise Interrupted(number)


def parse_arguments() -> argparse.Namespace:
    """Return the arguments that are no settings. The settings are in the environment then."""
    parser = OptionParser("start_server [model_name] [--foreground | --reload | --dry-run] [settings]", str(__doc__))
    text = "folder of a model (./folder), or the name of one to fetch into MODEL_DIR; default: MODEL_DIR is the model"
    parser.add_argument("model_name", nargs="?", help=text)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--foreground", action="store_true", help="stay, and stop the server when asked to end")
    how.add_argument("--reload", action="store_true", help="have the running server change to this model")
    text = "print the memory that the model in a folder needs and whether it fits, without loading it"
    how.add_argument("--dry-run", action="store_true", help=text)
    return parser.parse_into(os.environ)


if __name__ == "__main__":
    sys.exit(main())
