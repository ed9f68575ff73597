"""Stop the server and everything that belongs to it, and say what is waited for.

Running requests may end, for DRAIN_TIMEOUT or for the seconds given; what is still there then is killed. Exit status
0 when nothing is left, also when nothing was running; 1 when something could not be ended; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.log import printable
from engine.settings.config import Config
from engine.settings.disaggregation import ROLES, fill_in
from engine.settings.foreign.rank_table import settings_of_tables
from engine.settings.processes import STOPPING_FILE, default_run_path
from engine.settings.stopping import Stopping
from server_scripts.completion import add_completion
from server_scripts.processes import GATEWAY
from server_scripts.run_dir import Process, RunDir, ServerState, read_state, stop_command

POLL_S = 0.02
NEWS_EVERY_S = 5.0
INSIST_S = 15.0  # time for the supervisor to kill what has not ended
KILL_S = 5.0
FIND_S = 10.0  # time for a start that has just begun to write its state file
LOCK_S = 1.0  # the last thread of a process releases the lock, a little after the first one has ended


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="stop_server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seconds", nargs="?", type=_seconds, help="how long requests may still run")
    add_completion(parser)
    given = parser.parse_args()
    # Only these settings are read, so that a wrong one elsewhere cannot prevent a stop.
    try:
        of_tables = {} if os.environ.get("RUN_DIR") else settings_of_tables(os.environ)  # those of another instance
        config = Config(**folders_of({**os.environ, **of_tables}))
        if config.run_path.exists():
            return stop(RunDir(config.run_path), given.seconds)
        report_no_server(config.run_path)
        return 0
    except (ConfigError, OSError) as error:
        print(f"stop_server: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstop_server: interrupted; a server that was asked to stop continues to stop", file=sys.stderr)
        return 130


def folders_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return RUN_DIR and FD_LOG_DIR as settings, with their defaults for an instance of this role."""
    given = {
        "run_dir": environ.get("RUN_DIR"),
        "log_dir": environ.get("FD_LOG_DIR"),
        "splitwise_role": environ.get("SPLITWISE_ROLE"),
    }
    values: dict[str, Any] = {name: text for name, text in given.items() if text}
    if (port := environ.get("SERVICE_HTTP_PORT", "")).isdecimal():
        values["service_http_port"] = int(port)
    if values.get("splitwise_role") in ROLES:
        fill_in(values)
    return {name: values[name] for name in ("run_dir", "log_dir") if name in values}


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:  # argparse's own message would contain this function's name
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def stop(run_dir: RunDir, seconds: float | None) -> int:
    """Stop the server of this run directory and return the exit status.

    Running requests have `seconds`, by default the server's own stop timeout.
    """
    started = time.monotonic()
    state, lock = find(run_dir)
    if state is None:
        if lock is not None:
            report_no_server(run_dir.path)
            return 0
        # The server has another version, or runs in another container that shares the folder.
        why = f"a server has locked {run_dir.path} and does not say which processes it has"
        print(f"stop_server: {why}; `fuser {run_dir.path}/lock` shows their pids", file=sys.stderr)
        return 1
    if lock is None:
        end(run_dir, state, seconds)
        lock = run_dir.lock(LOCK_S)
        if lock is None and not state.supervisor.is_alive:
            print("stop_server: stopped; another start_server has begun since and continues")
            return 0
    else:
        print("stop_server: the supervisor is gone, ending the processes that it left", flush=True)
        if state.phase == "ready":
            drain(run_dir, state, state.stop_timeout_s if seconds is None else seconds)
    left = kill_all(run_dir.read_state() or state)
    run_dir.clean_up()
    if left:
        print(f"stop_server: could not end {', '.join(f'{p.name} (pid {p.pid})' for p in left)}", file=sys.stderr)
        return 1
    print(f"stop_server: stopped after {time.monotonic() - started:.1f} s")
    return 0


def report_no_server(run_path: Path, folder: Path = default_run_path()) -> None:  # noqa: B008 - never changes
    """Print that no server was running here, and the commands that stop this user's servers with other folders."""
    print(printable(f"stop_server: no server was running in RUN_DIR, which is {run_path}"))
    for path in sorted(folder.parent.glob(f"{folder.name}*")):
        if path != run_path and (state := read_state(path)) and state.supervisor.is_alive:
            command = stop_command(path, state.log_dir)
            print(printable(f"stop_server: another one runs (pid {state.supervisor.pid}): {command}"))


def find(run_dir: RunDir) -> tuple[ServerState | None, int | None]:
    """Return the state of the running server and None, or what a server has left behind and the lock, which is free
    then.
    """
    deadline = time.monotonic() + FIND_S
    while time.monotonic() < deadline:
        state = run_dir.read_state()
        if state and state.supervisor.is_alive:
            return state, None
        if (lock := run_dir.lock(POLL_S)) is not None:
            return run_dir.read_state(), lock
    return None, None


def end(run_dir: RunDir, state: ServerState, seconds: float | None) -> None:
    """Ask the supervisor to end the server and wait. After the timeout, ask it to kill what is left."""
    supervisor = state.supervisor
    if state.phase != "stopping":
        supervisor.kill(signal.SIGTERM)
    print(f"stop_server: stopping {printable(state.model)} (pid {supervisor.pid})", flush=True)
    if not wait_for_end(run_dir, supervisor, state.stop_timeout_s if seconds is None else seconds):
        print("stop_server: time is up, killing what is left", flush=True)
        supervisor.kill(signal.SIGTERM)  # a second signal forces the shutdown
        wait_for_end(run_dir, supervisor, INSIST_S)


def wait_for_end(run_dir: RunDir, supervisor: Process, timeout_s: float) -> bool:
    """Return True if the supervisor ends within `timeout_s` seconds. Print which processes are waited for."""
    deadline = time.monotonic() + timeout_s
    news_at = time.monotonic() + 1.0
    while supervisor.is_alive:
        now = time.monotonic()
        if now > deadline:
            return False
        if now > news_at:
            state = run_dir.read_state()
            names = [process.name for process in state.processes if process.is_alive] if state else []
            print(f"stop_server: waiting for {', '.join(names) or 'the supervisor'}", flush=True)
            news_at = now + NEWS_EVERY_S
        time.sleep(POLL_S)
    return True


def drain(run_dir: RunDir, state: ServerState, timeout_s: float) -> None:
    """Drain in place of a dead supervisor: no new requests are accepted, and running ones may finish."""
    run_dir.write(STOPPING_FILE, Stopping(time.monotonic()).text())
    gateways = [process for process in state.processes if process.name.startswith(GATEWAY)]
    for process in gateways:
        process.kill(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive for process in gateways) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def kill_all(state: ServerState | None) -> list[Process]:
    """Kill the recorded processes and their process groups, identified by pid and start time.

    Return those that are still alive.
    """
    recorded = (state.supervisor, *state.processes) if state else ()
    left = [process for process in recorded if process.is_alive and process.pid != os.getpid()]
    for process in left:
        process.kill_group()
    deadline = time.monotonic() + KILL_S
    while any(process.is_alive for process in left) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [process for process in left if process.is_alive]


if __name__ == "__main__":
    sys.exit(main())
