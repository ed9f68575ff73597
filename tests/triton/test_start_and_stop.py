"""start_server, stop_server and the demo for real: what they leave behind when things go wrong, and what they print."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.settings.config import Config
from engine.settings.processes import TRITON_FOLDER
from server_scripts.run_dir import RunDir
from tests.patience import wait_until
from tests.server import ROOT, a_server, is_clean, state_of

TIMEOUT_S = 60.0
DOCUMENTED = (  # a start of FastDeploy's, with the bundled model
    f"--model {ROOT}/demo_model --tensor-parallel-size 1 --quantization wint8 --max-model-len 4096 --max-num-seqs 20"
    " --gpu-memory-utilization 0.9 --kv-cache-ratio 0.9 --enable-chunked-prefill --enable-prefix-caching --use-warmup 1"
    " --max-num-partial-prefills 4 --max-long-partial-prefills 2 --splitwise-role mixed"
)
START = [sys.executable, "-m", "server_scripts.start"]


@pytest.fixture
def server(tmp_path):
    """Return a server that does not run yet. It is stopped at the end if it runs."""
    server = a_server(tmp_path, {})
    yield server
    assert server.command("stop_server", "0").returncode == 0


@contextmanager
def starting(server, *arguments, command=START, stdout=None):
    """Return a start_server that has not ended, with its output in start.out or in `stdout`."""
    with (server.run_dir.parent / "start.out").open("w") as out:
        process = subprocess.Popen([*command, *arguments], env=server.env, cwd=ROOT, stdout=stdout or out, stderr=out)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def output_of(server):
    return (server.run_dir.parent / "start.out").read_text()


def wait_for(server, phase, num_processes=0):
    """Wait for a phase of a start with at least so many processes, and return the state."""

    def found():
        state = state_of(server)
        return state and state.phase == phase and len(state.processes) >= num_processes and state

    return wait_until(found, lambda: output_of(server))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", [(), ("--foreground",)])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_the_start_leaves_nothing(server, number, status, how):
    with starting(server, *how) as process:
        state = wait_for(server, "starting", 1)
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == status
        assert is_clean(server, state)
        assert "interrupted, nothing is left running" in output_of(server)


@pytest.mark.thorough
def test_a_second_signal_during_the_start_leaves_nothing_either(server):
    with starting(server) as process:
        state = wait_for(server, "starting", 2)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: (now := state_of(server)) is None or now.phase == "stopping")
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
        assert is_clean(server, state)


def test_ctrl_c_in_the_demo_leaves_nothing_and_no_traceback(server):
    with starting(server, command=[sys.executable, "-m", "server_scripts.demo"]) as process:
        state = wait_for(server, "starting", 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
        assert is_clean(server, state)
        assert "Traceback" not in output_of(server)


def test_a_start_that_is_killed_takes_the_server_with_it(server):
    with starting(server) as process:
        state = wait_for(server, "starting", 1)
        process.kill()
        wait_until(lambda: is_clean(server, state))


@pytest.mark.thorough
def test_servers_that_differ_only_in_ports_and_logs_run_side_by_side(tmp_path):
    """Two instances of FastDeploy on one host are started with four port options and FD_LOG_DIR."""
    servers = [
        a_server(tmp_path / name, {"RUN_DIR": "", "FD_LOG_DIR": str(tmp_path / name)}) for name in ("one", "two")
    ]
    options = {
        "--port": "SERVICE_HTTP_PORT",
        "--engine-worker-queue-port": "SERVICE_GRPC_PORT",
        "--metrics-port": "METRICS_HTTP_PORT",
        "--cache-queue-port": "HEALTH_HTTP_PORT",
    }
    folders = [Config.from_env(server.env).run_path for server in servers]
    try:
        for server in servers:
            arguments = [text for name, env in options.items() for text in (name, str(server.ports[env]))]
            arguments += shlex.split(DOCUMENTED)
            server.env.update(INFERENCE_MSG_QUEUE_ID="1315", FD_ATTENTION_BACKEND="FLASH_ATTN")
            for env in options.values():
                del server.env[env]
            started = server.command("start_server", *arguments)
            assert started.returncode == 0, started.stdout
            for name in ("--enable-chunked-prefill", "INFERENCE_MSG_QUEUE_ID", "FD_ATTENTION_BACKEND"):
                assert f"note: {name} has no effect: " in started.stdout
        assert len({RunDir(folder).read_state().supervisor.pid for folder in folders}) == 2
    finally:
        for server, folder in zip(servers, folders, strict=True):
            assert server.command("stop_server", "0").returncode == 0
            shutil.rmtree(folder, ignore_errors=True)


def test_an_engine_that_cannot_start_fails_the_start_with_its_log(server):
    server.env["BLOCK_BS"] = "0.001"
    done = server.command("start_server")
    assert done.returncode == 1
    assert "failed: engine ended with exit status 1" in done.stdout
    assert re.search(r"the end of .*infer_server.log:\n.*BLOCK_BS", done.stdout, re.S)
    assert state_of(server) is None


@pytest.mark.thorough
def test_a_supervisor_that_breaks_fails_the_start_and_says_why(server):
    server.run_dir.mkdir(mode=0o700)
    (server.run_dir / TRITON_FOLDER).touch()  # where it makes a folder
    done = server.command("start_server")
    assert done.returncode == 1
    assert re.search(r"failed: .*File exists: .*triton", done.stdout)
    assert state_of(server) is None


@pytest.mark.thorough
def test_the_foreground_ends_with_0_and_copies_the_logs(server):
    server.env["OUTPUT_LOG_TO_CONSOLE"] = "1"
    with starting(server, "--foreground") as process:
        state = wait_for(server, "ready")
        assert state.supervisor.pid == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
        assert is_clean(server, state)
        text = output_of(server)
    assert re.search(r"^\[engine\] .*ready: \d+ blocks", text, re.M)
    assert re.search(r"^\[tritonserver\] .*Started GRPCInferenceService", text, re.M)


@pytest.mark.thorough
def test_a_terminal_that_stands_still_holds_up_no_restart_and_no_end(server):
    read_fd, write_fd = os.pipe()
    with starting(server, "--foreground", stdout=write_fd) as process:
        wait_for(server, "ready")
        with open(f"/proc/self/fd/{write_fd}", "wb", opener=nonblocking, buffering=0) as again:
            while again.write(b"x"):
                pass
        for _ in range(2):
            before = server.pid_of("health")
            os.kill(before, signal.SIGKILL)
            wait_until(lambda before=before: pid_now(server, "health") not in (None, before))
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    os.close(read_fd)
    os.close(write_fd)


def pid_now(server, name):
    """Return the pid, or None while there is none."""
    return next((process.pid for process in state_of(server).processes if process.name == name), None)


def nonblocking(path, flags):
    return os.open(path, flags | os.O_NONBLOCK)


def test_process_1_of_a_container_reaps_and_stops(server):
    isolate = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*isolate, "true"], capture_output=True).returncode:
        pytest.skip("unshare cannot make a process namespace here")
    with starting(server, "--foreground", command=[*isolate, *START]) as process:
        assert wait_for(server, "ready").supervisor.pid == 1
        [supervisor] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(supervisor), signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    assert state_of(server) is None


def answer_to_the_example(output):
    """Return the answer to the command that the demo prints."""
    curl = re.search(r"^curl .*?\n\n", output, re.M | re.S)[0]
    done = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=60)
    return "".join(json.loads(line)["token"] for line in done.stdout.splitlines())


def test_the_demo_answers_and_its_example_is_true(server):
    command = [sys.executable, "-m", "server_scripts.demo"]
    first = subprocess.run(command, env=server.env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "is ready" in first.stdout
    assert "The capital of France is Paris." in first.stdout
    second = subprocess.run(command, env=server.env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert second.returncode == 0, second.stdout + second.stderr
    assert second.stdout.startswith("a server is already running, using it: demo_model")

    of_images = subprocess.run([*command, "--images"], env=server.env, cwd=ROOT, capture_output=True, text=True)
    assert of_images.returncode == 1
    assert f"start_server {ROOT}/demo_model/vision --reload" in of_images.stderr
    if shutil.which("curl"):
        assert "Tokyo" in answer_to_the_example(first.stdout)


@pytest.mark.thorough
def test_the_demo_of_images_answers_and_its_example_is_true(server):
    command = [sys.executable, "-m", "server_scripts.demo", "--images"]
    done = subprocess.run(command, env=server.env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    asked = re.findall(r"^  picture: (.*)\n  expected: (.*)\n(.*)$", done.stdout, re.M)
    assert [Path(path).is_file() and answer == expected for path, expected, answer in asked] == [True] * 3
    if shutil.which("curl"):
        assert answer_to_the_example(done.stdout) == asked[0][1]
