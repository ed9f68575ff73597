"""The real tritonserver under the supervisor: it starts, answers, is restarted, and leaves nothing behind."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from engine.settings.config import Config
from engine.settings.processes import TRITON_FOLDER
from engine.wire.triton import infer_request, read_response
from server_scripts import triton
from server_scripts.child import ChildSpec
from server_scripts.health import HealthMonitor
from server_scripts.probe import Probe, ProbeError
from server_scripts.processes import PRIVATE, TRITONSERVER
from server_scripts.report import Reporter
from server_scripts.run_dir import Process, RunDir
from server_scripts.serve import new_state, run_until_stopped
from server_scripts.stop import kill_all
from server_scripts.supervisor import Supervisor
from tests.server import a_server, is_alive

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = Path(__file__).with_name("echo_repository")
TIMEOUT_S = 60.0


class EchoProbe(Probe):
    """There is neither engine nor gateway."""

    def check_all_ports(self) -> None:
        assert self.state()["ready"]


@contextmanager
def echo_server(folder):
    server = a_server(folder, {})
    (folder / "repository").symlink_to(REPOSITORY)
    with (folder / "supervisor.log").open("w") as log:
        command = [sys.executable, __file__, str(folder)]
        process = subprocess.Popen(command, env=server.env | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log)
    try:
        wait_until(lambda: phase(server) == "ready", folder, process)
        yield server, process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(TIMEOUT_S)
        finally:
            process.kill()
            kill_all(RunDir(server.run_dir).read_state())


def wait_until(condition, folder, process):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, (folder / "supervisor.log").read_text()
        time.sleep(0.02)


def phase(server):
    state = RunDir(server.run_dir).read_state()
    return state.phase if state else ""


def probe(server):
    return EchoProbe(config_of(server))


def config_of(server):
    return Config(service_host="127.0.0.1", run_dir=str(server.run_dir))


def words(server, text):
    """Return every word that came back, in order."""
    request = infer_request({"text": text})
    with grpc.insecure_channel(config_of(server).triton_target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        responses = list(stub.ModelStreamInfer(iter([request]), timeout=30))
    return [read_response(response).token for response in responses[:-1]]


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    with echo_server(tmp_path_factory.mktemp("echo")) as running:
        yield running


def page_of(server):
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(TIMEOUT_S)
        client.connect(str(config_of(server).triton_page))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()


def shared_memory(server):
    return list(Path("/dev/shm").glob(f"{RunDir(server.run_dir).shm_prefix}*"))


def test_text_of_any_length_goes_through_the_python_backend(echo):
    server, _ = echo
    assert words(server, "a word or two, \u4f60\u597d") == ["a", "word", "or", "two,", "\u4f60\u597d"]
    long = "x" * 3_000_001
    assert words(server, f"{long} end") == [long, "end"]


def test_shared_memory_is_for_this_user_alone(echo):
    server, _ = echo
    assert words(server, "a secret") == ["a", "secret"]
    assert shared_memory(server)
    assert [path.stat().st_mode & 0o077 for path in shared_memory(server)] == [0] * len(shared_memory(server))


def test_the_stub_runs_this_very_python(echo):
    assert probe(echo[0]).state()["reason"] == f"Python {sys.version_info[:2]}"


def test_metrics_are_served(echo):
    assert "nv_inference_request_success" in page_of(echo[0])


def wait_until_another_answers(server, process, before):
    """Wait for another tritonserver than the one with pid `before`."""

    def answers():
        try:
            return pid_or_zero(server, "tritonserver") not in (0, before) and probe(server).state()["ready"]
        except ProbeError:
            return False

    wait_until(answers, server.run_dir.parent, process)


@pytest.mark.parametrize("name", ["stub", "tritonserver"])
def test_a_killed_process_is_noticed_and_the_server_answers_again(echo, name):
    server, process = echo
    wait_until(lambda: pid_or_zero(server, "stub"), server.run_dir.parent, process)
    before = server.pid_of("tritonserver")
    os.kill(server.pid_of(name), signal.SIGKILL)
    wait_until_another_answers(server, process, before)
    assert words(server, "and again") == ["and", "again"]
    assert "nv_inference_request_success" in page_of(server)
    assert len(shared_memory(server)) == 1  # the killed one's is gone


def test_a_frozen_stub_is_noticed_too(echo):
    server, process = echo
    wait_until(lambda: pid_or_zero(server, "stub"), server.run_dir.parent, process)
    before = server.pid_of("tritonserver")
    os.kill(server.pid_of("stub"), signal.SIGSTOP)
    wait_until_another_answers(server, process, before)


def pid_or_zero(server, name):
    try:
        return server.pid_of(name)
    except LookupError:
        return 0


def test_a_stop_leaves_no_process_port_or_shared_memory(tmp_path):
    with echo_server(tmp_path) as (server, process):
        pids = [server.pid_of("tritonserver"), server.pid_of("stub")]
        assert shared_memory(server)
        done = server.command("stop_server")
        assert (done.returncode, done.stderr) == (0, "")
        assert process.wait(TIMEOUT_S) == 0
        assert not any(map(is_alive, pids))
        assert shared_memory(server) == []
        with pytest.raises(grpc.RpcError):
            words(server, "anybody?")


def test_in_folders_of_any_name_a_killed_supervisor_leaves_what_stop_server_can_clean_up():
    name = "it's a $folder (1 & 2)"
    with tempfile.TemporaryDirectory(prefix=name) as folder, echo_server(Path(folder)) as (server, process):
        assert words(server, "here too") == ["here", "too"]
        pids = [server.pid_of("tritonserver"), server.pid_of("stub")]
        process.kill()
        process.wait()
        done = server.command("stop_server")
        assert (done.returncode, done.stderr) == (0, "")
        assert not any(map(is_alive, pids))
        assert shared_memory(server) == []


def main(folder: Path) -> int:
    """Run the process of the supervisor."""
    logging.basicConfig(level="INFO", stream=sys.stdout)
    config = Config.from_env()
    run_dir = RunDir(config.run_path)
    lock = run_dir.lock()
    found = triton.find_tritonserver()
    triton.prepare(found, run_dir.path / TRITON_FOLDER, folder / "repository")
    command = [*PRIVATE, *triton.command(found, config, run_dir.shm_prefix, False)]
    env = triton.environment(found, run_dir.path / TRITON_FOLDER, dict(os.environ), False)
    supervisor = Supervisor(
        specs=[
            ChildSpec(
                TRITONSERVER,
                command,
                env,
                folder / "triton.log",
                run_dir.path / TRITON_FOLDER,
                socket=config.triton_page,
            )
        ],
        run_dir=run_dir,
        state=new_state(config, "echo", "starting"),
        config=replace(config, start_timeout_s=60.0, drain_timeout_s=5.0),
        monitor=HealthMonitor(EchoProbe(config), ask_every_s=0.2),
    )
    assert Process.of("supervisor", os.getpid()) == supervisor.state.supervisor
    status = run_until_stopped(supervisor, Reporter())
    os.close(lock)
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
