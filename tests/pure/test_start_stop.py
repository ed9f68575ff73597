"""start_server and stop_server as commands: what they refuse, what they say, and their exit status."""

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.settings.config import Config
from server_scripts import model_source
from server_scripts import stop as stop_module
from server_scripts.model_source import Source, export_if_needed
from server_scripts.run_dir import Process, RunDir, State, read_stat
from tests.patience import wait_until
from tests.pure.fake_server import fake_server, kill_supervisor
from tests.pure.model_server import Fault, ModelServer
from tests.server import a_server, is_alive

ALL = {"engine": "", "tritonserver": "with helper", "gateway-0": "", "health": ""}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server(tmp_path):
    return a_server(tmp_path, {"MODEL_DIR": str(tmp_path / "model")})


def stop(folder, *arguments):
    env = {**os.environ, "RUN_DIR": str(folder / "run"), "SERVICE_GRPC_PORT": "not for stop_server to judge"}
    command = [sys.executable, "-m", "server_scripts.stop", *arguments]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_wrong_setting_is_one_line_and_status_2(server):
    server.env["BATCH_SIZE"] = "many"
    done = server.command("start_server")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "start_server: BATCH_SIZE is 'many', it must be a whole number\n"
    server.env["BLOCK_RATIO"] = "x"
    assert (
        server.command("start_server").stderr == done.stderr + "start_server: BLOCK_RATIO is 'x', it must be a number\n"
    )


def test_a_file_with_a_format_of_calls_is_read_before_anything_is_started(server):
    server.env["TOOL_CALL_PARSER"] = "/no/such/file.py"
    done = server.command("start_server")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("start_server: TOOL_CALL_PARSER is '/no/such/file.py': FileNotFoundError: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["MODEL_DIR", "EXPORT_CACHE_DIR", "RUN_DIR", "FD_LOG_DIR"])
def test_a_home_that_does_not_exist_is_a_wrong_setting(server, name):
    server.env[name] = "~no-such-user/folder"
    done = server.command("start_server")
    assert done.returncode == 2
    assert done.stderr.startswith(f"start_server: {name} is '~no-such-user/folder', and there is no such home")
    if name == "RUN_DIR":
        stopped = server.command("stop_server")
        assert stopped.returncode == 1
        assert stopped.stderr.startswith("stop_server: RUN_DIR is '~no-such-user/folder'")


def test_what_a_library_prints_during_an_export_is_no_step(server, tmp_path, monkeypatch):
    (tmp_path / "noisy.py").write_text("print('step one'); print(); print('word'); print('result /graph')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("server_scripts.model_source.EXPORTER", "noisy")
    told = []
    config = Config(log_dir=str(tmp_path), export_cache_dir=str(tmp_path))
    assert export_if_needed(config, Source(tmp_path, "m"), told.append) == Path("/graph")
    assert told == ["one"]


@pytest.mark.parametrize(("variable", "status"), [("RUN_DIR", 2), ("FD_LOG_DIR", 2), ("EXPORT_CACHE_DIR", 2)])
def test_a_folder_that_cannot_be_made_is_named_by_its_variable(server, tmp_path, variable, status):
    (tmp_path / "file").touch()
    server.env[variable] = str(tmp_path / "file" / "a" / "b")
    server.env["MODEL_DIR"] = str(ROOT / "demo_model")
    done = server.command("start_server")
    assert done.returncode == status
    told = done.stdout + done.stderr
    assert f"{variable}: the folder {tmp_path}/file" in told or f"{variable} is '{tmp_path}/file/a/b'" in told
    assert "Not a directory" in told


def test_a_folder_that_cannot_be_written_to_is_named_by_its_variable(checkpoint, tmp_path, monkeypatch):
    """In /proc not even root makes anything."""
    with pytest.raises(ConfigError, match="EXPORT_CACHE_DIR is '/proc': .* '/proc/"):
        model_source.export(checkpoint("qwen2"), Path("/proc"))
    into = "fetching a/b into MODEL_DIR, which is '/proc': .* '/proc/a"
    with pytest.raises(model_source.ModelUnavailable, match=into):
        model_source.find_source(Config(model_dir="/proc"), "a/b", print)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(ConfigError, match=f"RUN_DIR: the folder {tmp_path} cannot be written to by this user"):
        RunDir(tmp_path)


def test_a_taken_port_is_status_2_and_nothing_is_left(server):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", server.ports["METRICS_HTTP_PORT"]))
        sock.listen()
        done = server.command("start_server")
    assert done.returncode == 2
    assert "start_server: METRICS_HTTP_PORT is" in done.stderr
    assert f"(pid {os.getpid()})" in done.stderr
    assert RunDir(server.run_dir).read_state() is None


def test_a_missing_model_says_what_to_do(server):
    done = server.command("start_server")
    assert done.returncode == 1
    assert "which is no folder. Set MODEL_DIR to a checkpoint or an exported model, or name a model" in done.stdout
    assert RunDir(server.run_dir).read_state() is None


def test_a_model_that_cannot_be_exported_says_why(server, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    done = server.command("start_server")
    assert done.returncode == 1
    assert "failed: exporting" in done.stdout
    assert "model.safetensors is missing" in done.stdout


def test_a_name_that_is_no_name_says_so(server):
    done = server.command("start_server", "not-a-name")
    assert done.returncode == 1
    assert "model_name is 'not-a-name', it must be org/model" in done.stdout
    assert "MODEL_DIR=" not in done.stdout
    done = server.command("start_server", str(ROOT / "demo_model"))
    assert f"To serve the folder {ROOT}/demo_model: MODEL_DIR={ROOT}/demo_model start_server" in done.stdout


def test_a_setting_that_the_model_cannot_follow_is_named(exported, checkpoint, tmp_path, monkeypatch, capsys):
    graph_dir = exported("qwen2")
    for name, value in {"DEVICE": "cpu", "DTYPE": "float16", "LORA_MODULES": f"a={tmp_path}/none"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="DTYPE or the model's name asks for float16, which only GPUs compute with"):
        model_source.export(checkpoint("qwen2"), tmp_path)
    assert model_source.export(graph_dir, tmp_path) == graph_dir
    assert capsys.readouterr().out == f"step note: DTYPE has no effect: {graph_dir} is exported already\n"
    with pytest.raises(ConfigError, match="LORA_MODULES: adapter .*/none: adapter_config.json cannot be read"):
        model_source.check_settings(graph_dir)


@pytest.mark.parametrize(
    ("env", "trouble"),
    [
        ({"SWAP_SPACE": "1"}, "SWAP_SPACE is 1, but on the CPU the KV cache is in the host's memory itself"),
        ({"MP_NUM": "2"}, "MP_NUM is 2, {graph_dir} was exported for 1; set MP_NUM=1"),
        ({"LORA_MODULES": "a=/none"}, "LORA_MODULES: adapter /none: adapter_config.json cannot be read"),
        ({"LORA_MODULES": "qwen2=/none"}, "LORA_MODULES has 'qwen2', which is the model's own name"),
    ],
)
def test_a_setting_that_does_not_fit_the_model_is_status_2_before_anything_is_started(server, exported, env, trouble):
    server.env.update({"DEVICE": "cpu", "MODEL_DIR": str(exported("qwen2")), **env})
    done = server.command("start_server")
    assert done.returncode == 2
    assert done.stderr.startswith(f"start_server: {trouble.format(graph_dir=exported('qwen2'))}")
    assert "starting the engine" not in done.stdout


def test_a_quantization_that_is_not_built_is_refused_before_anything_is_fetched(server):
    with ModelServer() as hub:
        server.env["HF_ENDPOINT"] = hub.url
        done = server.command("start_server", "org/model/a8w8_fp8")
        assert hub.requests == []
    assert done.returncode == 2
    assert "the name asks for a8w8_fp8, exporting as that is not supported yet" in done.stderr


def test_an_architecture_that_is_not_built_is_refused_before_its_weights_are_fetched(server):
    with ModelServer() as hub:
        hub.add_repo("org/model", {"config.json": b'{"model_type": "mixtral"}', "model.safetensors": b"weights"})
        server.env["HF_ENDPOINT"] = hub.url
        done = server.command("start_server", "org/model")
        assert not any("safetensors" in path for _, path, _ in hub.requests)
    assert done.returncode == 1
    assert "failed: fetching org/model: config.json: model_type is 'mixtral', supported are llama" in done.stdout


def test_a_second_start_says_what_runs(server, tmp_path):
    with fake_server(tmp_path, ALL) as running:
        running.wait_until_ready()
        done = server.command("start_server")
        assert done.returncode == 1
        assert f"fake is ready, pid {running.process.pid}, since " in done.stdout
        assert running.process.poll() is None


def test_stop_ends_everything_and_is_harmless_twice(tmp_path):
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        processes = server.state.processes
        done = stop(tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"stop_server: stopping fake (pid {server.process.pid})\n")
        assert not any(process.is_alive for process in processes)
        assert server.process.wait(60) == 0
    again = stop(tmp_path)
    assert (again.returncode, again.stdout) == (0, "stop_server: no server was running\n")


def test_stop_where_no_server_ever_was_makes_no_folder(tmp_path):
    done = stop(tmp_path)
    assert (done.returncode, done.stdout) == (0, "stop_server: no server was running\n")
    assert list(tmp_path.iterdir()) == []


def test_stop_insists_after_the_given_seconds(tmp_path):
    with fake_server(tmp_path, ALL | {"gateway-0": "stubborn"}, drain_timeout_s=600) as server:
        server.wait_until_ready()
        processes = server.state.processes
        done = stop(tmp_path, "1")  # fails after a minute
        assert done.returncode == 0
        assert "time is up, killing what is left" in done.stdout
        assert not any(process.is_alive for process in processes)


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "soon"])
def test_stop_refuses_what_is_no_time_to_wait(tmp_path, seconds):
    done = stop(tmp_path, seconds)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"stop_server: error: argument seconds: {seconds!r} is no number of seconds"


def test_an_interrupted_stop_is_one_line_and_the_server_goes_on_ending(tmp_path):
    command = [sys.executable, "-m", "server_scripts.stop"]
    env = {**os.environ, "RUN_DIR": str(tmp_path / "run")}
    with fake_server(tmp_path, ALL | {"gateway-0": "stubborn", "gateway-1": ""}, drain_timeout_s=600) as server:
        server.wait_until_ready()
        with subprocess.Popen(command, env=env, cwd=ROOT, stdout=-1, stderr=-1, text=True) as stopping:
            server.wait_until(lambda: "gateway-1 ended" in server.notes)
            stopping.send_signal(signal.SIGINT)
            _, said = stopping.communicate(timeout=20)
        assert stopping.returncode == 130
        assert said == "\nstop_server: interrupted; a server that was asked to end goes on ending\n"
        assert server.state.phase == "stopping"


def test_stop_ends_what_a_supervisor_that_was_killed_has_left_and_lets_requests_end(tmp_path, capsys):
    with fake_server(tmp_path, ALL | {"engine": "with helper"}) as server:
        server.wait_until_ready()
        shm = tmp_path / "shm" / f"{server.run_dir.shm_prefix}left"
        shm.touch()
        processes, helper = server.state.processes, server.noted_pid("engine")
        kill_supervisor(server)
        assert all(process.is_alive for process in processes)
        assert stop_module.stop(server.run_dir, None) == 0
        assert "the supervisor is gone" in capsys.readouterr().out
        assert [line for line in server.notes if line.endswith("ended")] == ["gateway-0 ended"]  # it was asked
        server.wait_until(lambda: not any(process.is_alive for process in processes) and not is_alive(helper))
        assert not shm.exists()
        assert server.state is None


def test_a_second_stop_waits_as_the_first_does_and_lets_requests_end(tmp_path):
    command = [sys.executable, "-m", "server_scripts.stop"]
    env = {**os.environ, "RUN_DIR": str(tmp_path / "run")}
    with fake_server(tmp_path, ALL | {"gateway-0": "stubborn"}, drain_timeout_s=600) as server:
        server.wait_until_ready()
        with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL) as first:
            server.wait_until(lambda: server.state.phase == "stopping")
            with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as second:
                second.stdout.readline()
                assert second.stdout.readline().startswith("stop_server: waiting for ")
                assert server.process.poll() is None
                assert stop(tmp_path, "0").returncode == 0
                assert (first.wait(20), second.wait(20)) == (0, 0)


def test_stop_finds_a_start_that_has_only_just_begun(tmp_path):
    """It has the lock, but has not said yet which process it is."""
    run_dir = RunDir(tmp_path / "run")
    lock = run_dir.lock()
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], pass_fds=[lock]) as start:
        os.close(lock)
        env = {**os.environ, "RUN_DIR": str(run_dir.path)}
        command = [sys.executable, "-m", "server_scripts.stop"]
        with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL) as stopping:
            try:
                with pytest.raises(subprocess.TimeoutExpired):
                    stopping.wait(1.0)
                me = Process.of("supervisor", start.pid)
                run_dir.write_state(State("preparing", me, 0.0, "m", "", {}, "", 5.0))
                assert start.wait(20) == -signal.SIGTERM
                assert stopping.wait(20) == 0
            finally:
                start.kill()


def test_stop_leaves_a_server_alone_that_was_started_since(tmp_path, monkeypatch):
    run_dir = RunDir(tmp_path / "run")
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(sleep) as old, subprocess.Popen(sleep) as new:
        state = State("ready", Process.of("", old.pid), 0.0, "m", "", {}, "", 5.0)
        run_dir.write_state(state)
        locks = []

        def wait_for_end(*_):
            old.wait()
            locks.append(run_dir.lock())
            run_dir.write_state(replace(state, supervisor=Process.of("", new.pid)))
            return True

        monkeypatch.setattr(stop_module, "wait_for_end", wait_for_end)
        try:
            assert stop_module.stop(run_dir, None) == 0
            assert new.poll() is None
            assert run_dir.read_state().supervisor.pid == new.pid
        finally:
            new.kill()
            os.close(locks[0])


def test_stop_kills_what_is_recorded_and_spares_a_recycled_pid(tmp_path):
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(sleep) as ours, subprocess.Popen(sleep) as other:
        try:
            run_dir = RunDir(tmp_path / "run")
            recycled = Process("engine", other.pid, Process.of("", other.pid).start_time - 1)
            gone = Process("supervisor", other.pid, 1)
            left = [recycled, Process.of("tritonserver", ours.pid)]
            run_dir.write_state(State("ready", gone, 0.0, "m", "", {}, "", 5.0, left))
            assert stop(tmp_path).returncode == 0
            assert ours.wait(60) == -signal.SIGKILL
            assert other.poll() is None
        finally:
            ours.kill()
            other.kill()


@pytest.mark.parametrize(("number", "is_nohup"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_signal_while_a_model_is_fetched_leaves_nothing(server, number, is_nohup):
    with socket.socket() as hub:  # accepts and never answers
        hub.bind(("127.0.0.1", 0))
        hub.listen()
        server.env["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.getsockname()[1]}"
        command = [sys.executable, "-m", "server_scripts.start", "org/model"]
        command = ["nohup", *command] if is_nohup else command
        with subprocess.Popen(command, env=server.env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as start:
            hub.settimeout(60)
            connection, _ = hub.accept()
            with connection:
                state = RunDir(server.run_dir).read_state()
                assert (state.phase, read_stat(state.supervisor.pid).parent) == ("preparing", start.pid)
                ignored = re.search(r"^SigIgn:\s*(\w+)", Path(f"/proc/{start.pid}/status").read_text(), re.M)[1]
                assert (int(ignored, 16) & 1 << signal.SIGHUP - 1 > 0) == is_nohup
                start.send_signal(number)
                assert start.wait(60) == 128 + number
            assert "interrupted, nothing is left running" in start.stdout.read()
    assert RunDir(server.run_dir).read_state() is None


def test_a_signal_does_not_wait_for_a_server_that_is_silent_in_mid_file(server):
    with ModelServer() as hub:
        config = (ROOT / "demo_model" / "config.json").read_bytes()
        hub.add_repo("org/model", {"config.json": config, "model.safetensors": b"weights"})
        hub.faults[hub.redirects[hub.hub_path("org/model", "model.safetensors")]] = [Fault(is_silent=True)]
        server.env["HF_ENDPOINT"] = hub.url
        command = [sys.executable, "-m", "server_scripts.start", "org/model"]
        with subprocess.Popen(command, env=server.env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as start:
            assert hub.has_fallen_silent.wait(60)
            start.send_signal(signal.SIGTERM)
            assert start.wait(10) == 128 + signal.SIGTERM
            assert "interrupted, nothing is left running" in start.stdout.read()
    assert RunDir(server.run_dir).read_state() is None


def test_two_signals_at_the_same_moment_are_answered_once_and_without_a_traceback():
    program = """
import os, signal
from server_scripts.start import STOP_SIGNALS, Interrupted, _interrupt
for number in STOP_SIGNALS:
    signal.signal(number, _interrupt)
signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
for number in STOP_SIGNALS:
    os.kill(os.getpid(), number)
try:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
except Interrupted:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_a_signal_ends_what_an_export_has_started(server, tmp_path, monkeypatch):
    compiler = (
        "import subprocess, sys; c = subprocess.Popen(['sleep', '600']); print('step', c.pid, flush=True); c.wait()"
    )
    (tmp_path / "slow.py").write_text(compiler)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("server_scripts.model_source.EXPORTER", "slow")
    pids = []

    def interrupt(line):
        pids.append(int(line))
        raise KeyboardInterrupt

    config = Config(log_dir=str(tmp_path), export_cache_dir=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        export_if_needed(config, Source(tmp_path, "m"), interrupt)
    wait_until(lambda: not is_alive(pids[0]))


def test_a_server_that_is_killed_during_its_start_is_named_with_the_signal(server):
    with socket.create_server(("127.0.0.1", 0)) as hub:  # accepts and never answers
        server.env["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.getsockname()[1]}"
        command = [sys.executable, "-m", "server_scripts.start", "org/model"]
        with subprocess.Popen(command, env=server.env, cwd=ROOT, stdout=-1, stderr=-1, text=True) as start:
            hub.accept()[0].close()
            os.kill(RunDir(server.run_dir).read_state().supervisor.pid, signal.SIGKILL)
            _, said = start.communicate(timeout=60)
        assert (start.returncode, said) == (1, "start_server: the server was killed by SIGKILL\n")
    assert server.command("stop_server").returncode == 0
    assert RunDir(server.run_dir).read_state() is None


def test_nothing_with_threads_is_loaded_before_the_server_is_forked():
    unwanted = "{'numpy', 'grpc', 'zmq', 'huggingface_hub'}"
    code = f"import sys; from server_scripts import serve, start; print(sys.modules.keys() & {unwanted})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", ["start_server", "stop_server"])
def test_the_commands_work_without_an_installation_and_through_a_link(tmp_path, name):
    (tmp_path / name).symlink_to(ROOT / "server_scripts" / name)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / name, "--help"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {name}")
