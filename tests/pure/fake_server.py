"""A supervisor with fake children, in a process of its own: `python fake_server.py FOLDER CHILDREN`.

Its tests write what the server would answer into FOLDER/answers.json and read the state file, the log and what the
children have noted in FOLDER/notes.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.settings.config import Config
from server_scripts import child, reload, serve
from server_scripts.child import ChildSpec
from server_scripts.health import HealthMonitor
from server_scripts.probe import ProbeError
from server_scripts.report import Reporter
from server_scripts.run_dir import Process, RunDir, ServerState
from server_scripts.supervisor import Supervisor
from server_scripts.takeover import find_orphans
from tests.patience import wait_until

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("fake_child.py")
ALL = {"engine": "", "tritonserver": "with helper", "gateway-0": "", "health": ""}  # and what they do
READY = {"state": {"ready": True, "engine_silent_s": 0.0, "num_open": 0}}
TIMEOUT_S = 60.0


class FakeProbe:
    """Answers as the test has written."""

    def __init__(self, path: Path):
        self._path = path

    def _answers(self) -> dict:
        return json.loads(self._path.read_text())

    def state(self, timeout_s: float = 0.0) -> dict:
        with (self._path.parent / "asked").open("a") as file:
            file.write("!")
        if (state := self._answers().get("state")) is None:
            raise ProbeError("no answer from the model")
        return state

    def check_all_ports(self) -> None:
        if error := self._answers().get("check_error"):
            raise RuntimeError(error)

    def check_model(self) -> None:
        if error := self._answers().get("model_error"):
            raise RuntimeError(error)

    def num_open(self) -> int:
        return int(self._answers().get("num_open", 0))


@dataclass
class FakeServer:
    """The test's side: the supervisor's process and the files between them."""

    folder: Path
    process: subprocess.Popen
    names: tuple[str, ...]  # of the children

    def answer(self, **answers) -> None:
        partial = self.folder / "answers.partial"
        partial.write_text(json.dumps(answers))
        partial.replace(self.folder / "answers.json")

    @property
    def run_dir(self) -> RunDir:
        return a_run_dir(self.folder)

    @property
    def state(self) -> ServerState | None:
        return self.run_dir.read_state()

    @property
    def notes(self) -> list[str]:
        path = self.folder / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def noted_pid(self, name: str) -> int:
        """Return the pid of the last process that the child of this name started itself."""
        [*_, last] = [line for line in self.notes if line.startswith(f"{name} helper ")]
        return int(last.split()[-1])

    @property
    def num_asked(self) -> int:
        """Return how often the model was asked."""
        path = self.folder / "asked"
        return path.stat().st_size if path.exists() else 0

    @property
    def log(self) -> str:
        return (self.folder / "supervisor.log").read_text()

    def pid_now(self, name: str) -> int | None:
        """Return the pid, or None while it does not run: a child may run a moment before its pid is in the state
        file.
        """
        state = self.state
        return next((p.pid for p in state.processes if p.name == name), None) if state else None

    def pid_of(self, name: str) -> int:
        pid = self.pid_now(name)
        if pid is None:
            raise LookupError(f"{name} does not run")
        return pid

    def kill(self, name: str) -> int:
        """Kill a process and return its pid."""
        pid = self.wait_until(lambda: self.pid_now(name))
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_until(self, condition) -> Any:
        return wait_until(condition, lambda: self.log)

    def wait_until_ready(self) -> None:
        """Wait until the server is ready and all its processes have started."""
        self.wait_until(lambda: self.state is not None and self.state.phase == "ready")
        self.wait_until(lambda: {f"{name} started" for name in self.names} <= set(self.notes))
        self.wait_until(lambda: all(self.pid_now(name) for name in self.names))
        if "tritonserver" in self.names:
            self.wait_until(lambda: self.pid_now("tritonserver helper"))

    def wait_until_replaced(self, name: str, pid: int) -> int:
        self.wait_until(lambda: self.pid_now(name) not in (None, pid))
        return self.pid_of(name)


def a_run_dir(folder: Path) -> RunDir:
    """Create a run directory, with a folder in place of /dev/shm, where a test that is killed would leave something
    behind.
    """
    (folder / "shm").mkdir(exist_ok=True)
    return RunDir(folder / "run", folder / "shm")


def kill_supervisor(server: FakeServer) -> None:
    """Kill the supervisor and no other process."""
    server.process.kill()
    server.process.wait()


@contextmanager
def fake_server(
    folder: Path, children: dict[str, str], answers: dict[str, Any] | None = None, **options
) -> Iterator[FakeServer]:
    """Run a supervisor with fake children. `children` says by name what fake_child.py does, `answers` what a probe is
    answered at first (by default that the server is ready). `options` are fields of Config, `ask_every_s` and
    `check_for_s`."""
    file = folder / "answers.json"
    if answers is not None or not file.exists():
        file.write_text(json.dumps(READY if answers is None else answers))
    with (folder / "supervisor.log").open("a") as log:
        command = [sys.executable, __file__, str(folder), json.dumps(children), json.dumps(options)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=ROOT)
    server = FakeServer(folder, process, tuple(children))
    try:
        yield server
    finally:
        process.kill()
        process.wait()
        (folder / "over").touch()  # ends children that are still running, and their children


def main(folder: Path, children: dict[str, str], options: dict) -> int:
    logging.basicConfig(level="INFO", stream=sys.stdout)
    child.MAX_BACK_OFF_S = child.HOST_LOST_S = 0.1
    child.MAX_STOPPED_S = 0.5
    timing = {"ask_every_s": options.pop("ask_every_s", 0.05), "check_for_s": options.pop("check_for_s", 30.0)}
    settings = {"drain_delay_s": 0.0, "drain_timeout_s": 1.0, "check_health_interval_s": 60.0}
    settings |= {"start_timeout_s": TIMEOUT_S} | options
    run_dir = a_run_dir(folder)
    lock = run_dir.lock()
    me = Process.of("supervisor", os.getpid())
    reload.STOP_MARGIN_S = 0.5
    serve.TURN_S = 0.05  # its tests wait for what the next turn notes
    # In place of a model's folder, what its engine is to do.
    reload.all_specs = lambda config, graph_dir, label, run_dir: [
        replace(spec, env={**spec.env, "GRAPH_DIR": graph_dir.name})
        for name, what in children.items()
        for spec in [a_spec(name, graph_dir.name if name == "engine" else what, folder)]
    ]
    supervisor = Supervisor(
        specs=[a_spec(name, what, folder) for name, what in children.items()],
        run_dir=run_dir,
        state=ServerState("preparing", me, time.time(), "fake", "127.0.0.1", {}, str(folder), 10.0),
        config=Config(**settings),
        monitor=HealthMonitor(FakeProbe(folder / "answers.json"), **timing),
    )
    if orphans := find_orphans(run_dir):
        supervisor.take_over(orphans.processes)
    status = serve.run_until_stopped(supervisor, Reporter())
    os.close(lock)
    return status


def a_spec(name: str, what: str, folder: Path) -> ChildSpec:
    return ChildSpec(
        name=name,
        command=[sys.executable, "-S", str(CHILD), name, what, str(folder)],
        env=dict(os.environ),
        log_path=folder / f"{name}.log",
        max_crashes=3 if name == "engine" else None,
        progress_file=folder / "progress" if name == "engine" else None,
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])))
