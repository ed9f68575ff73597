"""`stop_server [seconds]`: ends the server and everything that belongs to it, and says what it waits for.

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

from engine.errors import ConfigError
from engine.settings.config import Config
from server_scripts.run_dir import Process, RunDir, State

POLL_S = 0.1
NEWS_EVERY_S = 5.0
INSIST_S = 15.0  # for the supervisor to kill what has not ended
KILL_S = 5.0
FIND_S = 10.0  # for a start that has just begun to say which process it is
LOCK_S = 1.0  # the lock goes with the last thread of its process, which may end a little after the first


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="stop_server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seconds", nargs="?", type=_seconds, help="how long requests may still run")
    given = parser.parse_args()
    # Only this setting matters, and a wrong one elsewhere must not keep a server running.
    config = Config(run_dir=os.environ.get("RUN_DIR", ""))
    try:
        if not config.run_path.exists():
            print("stop_server: no server was running")
            return 0
        return stop(RunDir(config.run_path), given.seconds)
    except (ConfigError, OSError) as error:
        print(f"stop_server: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstop_server: interrupted; a server that was asked to end goes on ending", file=sys.stderr)
        return 130


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def stop(run_dir: RunDir, seconds: float | None) -> int:
    started = time.monotonic()
    state = find(run_dir)
    if state is None:
        return say_nothing_runs(run_dir)
    supervisor = state.supervisor
    if supervisor.is_alive if state.phase == "stopping" else supervisor.kill(signal.SIGTERM):
        print(f"stop_server: stopping {state.model} (pid {supervisor.pid})", flush=True)
        if not wait_for_end(run_dir, supervisor, state.stop_timeout_s if seconds is None else seconds):
            print("stop_server: time is up, killing what is left", flush=True)
            supervisor.kill(signal.SIGTERM)  # the second time it insists
            wait_for_end(run_dir, supervisor, INSIST_S)
    else:
        print("stop_server: the supervisor is gone, ending what it has left", flush=True)
    lock = wait_for_lock(run_dir)
    if lock is None and not supervisor.is_alive:
        print("stop_server: stopped; another start_server has begun since and goes on")
        return 0
    left = kill_all(run_dir.read_state() or state)
    run_dir.clean_up()
    if lock is not None:
        os.close(lock)
    if left:
        print(f"stop_server: could not end {', '.join(f'{p.name} (pid {p.pid})' for p in left)}", file=sys.stderr)
        return 1
    print(f"stop_server: stopped after {time.monotonic() - started:.1f} s")
    return 0


def find(run_dir: RunDir) -> State | None:
    """The server that runs, or what one has left behind: then nobody holds the lock."""
    deadline = time.monotonic() + FIND_S
    while time.monotonic() < deadline:
        state = run_dir.read_state()
        if state and state.supervisor.is_alive:
            return state
        if (lock := run_dir.lock()) is not None:
            os.close(lock)
            return state
        time.sleep(POLL_S)
    return None


def wait_for_lock(run_dir: RunDir) -> int | None:
    """None: another server has it."""
    deadline = time.monotonic() + LOCK_S
    while (lock := run_dir.lock()) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return lock


def say_nothing_runs(run_dir: RunDir) -> int:
    lock = run_dir.lock()
    if lock is None:  # a server of another version, or of another container that shares the folder
        print(
            f"stop_server: a server has locked {run_dir.path} and does not say which processes it has", file=sys.stderr
        )
        return 1
    os.close(lock)
    print("stop_server: no server was running")
    return 0


def wait_for_end(run_dir: RunDir, supervisor: Process, timeout_s: float) -> bool:
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


def kill_all(state: State) -> list[Process]:
    """Ends the recorded processes that are left, by their recorded pid and start time. Returns those that stay."""
    left = [process for process in (state.supervisor, *state.processes) if process.is_alive]
    for process in left:
        process.kill()
    deadline = time.monotonic() + KILL_S
    while any(process.is_alive for process in left) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [process for process in left if process.is_alive]


if __name__ == "__main__":
    sys.exit(main())
