"""start_server as a command: what it refuses, what it says, and its exit status."""

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from engine.errors import ConfigError
from engine.settings.config import Config
from server_scripts import model_source, start, stop
from server_scripts.model_source import ModelSource, export_if_needed
from server_scripts.run_dir import RunDir, read_stat
from tests.patience import wait_until
from tests.pure.fake_server import ALL, fake_server
from tests.pure.model_server import Fault, ModelServer
from tests.server import a_server, is_alive

pytestmark = pytest.mark.slow  # processes are started

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def server(tmp_path):
    return a_server(tmp_path, {"MODEL_DIR": str(tmp_path / "model")})


@pytest.fixture
def refused(server, capfd):
    """Return a function that runs a command in this process and returns its exit status, output and errors. The command
    must refuse the settings before it starts a process.
    """
    handlers = {number: signal.getsignal(number) for number in start.STOP_SIGNALS}

    def run(main=start.main):
        argv = patch.object(sys, "argv", ["command"])
        with patch.dict(os.environ, server.env, clear=True), argv, patch.object(start, "detach", None):
            status = main()
        return status, *capfd.readouterr()

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_wrong_setting_is_one_line_and_status_2(server, refused):
    line = "start_server: BATCH_SIZE is 'many', it must be a whole number\n"
    server.env["BATCH_SIZE"] = "many"
    done = server.command("start_server")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    server.env["BLOCK_RATIO"] = "x"
    assert refused() == (2, "", f"{line}start_server: BLOCK_RATIO is 'x', it must be a number\n")


def test_overrides_that_are_none_and_a_folder_that_is_not_there_are_wrong_settings(server, refused):
    for name, value, says in (
        ("LORA_DIR", "/no/such/folder", "LORA_DIR is '/no/such/folder', there is no such folder\n"),
        ("HF_OVERRIDES", "{bad", "HF_OVERRIDES is '{bad', it must be a JSON object: Expecting property name"),
        ("HF_OVERRIDES", "[1]", "HF_OVERRIDES is '[1]', it must be a JSON object: '[1]' is none\n"),
    ):
        server.env[name] = value
        status, out, err = refused()
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"start_server: {says}")
        del server.env[name]


def test_a_file_with_a_format_of_calls_is_read_before_anything_is_started(server):
    server.env["TOOL_CALL_PARSER"] = "/no/such/file.py"
    done = server.command("start_server")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("start_server: TOOL_CALL_PARSER is '/no/such/file.py': FileNotFoundError: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["MODEL_DIR", "RUN_DIR"])  # of the model, of the server
def test_a_home_that_does_not_exist_is_a_wrong_setting(server, refused, name):
    server.env[name] = "~no-such-user/folder"
    status, _, err = refused()
    assert status == 2
    assert err.startswith(f"start_server: {name} is '~no-such-user/folder', and there is no such home")
    if name == "RUN_DIR":
        status, _, err = refused(stop.main)
        assert status == 1
        assert err.startswith("stop_server: RUN_DIR is '~no-such-user/folder'")


def test_output_of_a_library_during_an_export_is_not_a_step(server, tmp_path, monkeypatch):
    (tmp_path / "noisy.py").write_text("print('step one'); print(); print('word'); print('result /graph')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("server_scripts.model_source.EXPORTER", "noisy")
    reported = []
    config = Config(log_dir=str(tmp_path), export_cache_dir=str(tmp_path))
    assert export_if_needed(config, ModelSource(tmp_path, "m"), reported.append) == Path("/graph")
    assert reported == ["one"]


@pytest.mark.parametrize(("variable", "status"), [("RUN_DIR", 2), ("FD_LOG_DIR", 2), ("EXPORT_CACHE_DIR", 2)])
def test_a_folder_that_cannot_be_made_is_named_by_its_variable(server, tmp_path, variable, status):
    (tmp_path / "file").touch()
    server.env[variable] = str(tmp_path / "file" / "a" / "b")
    server.env["MODEL_DIR"] = str(ROOT / "demo_model")
    done = server.command("start_server")
    assert done.returncode == status
    reported = done.stdout + done.stderr
    assert f"{variable}: the folder {tmp_path}/file" in reported or f"{variable} is '{tmp_path}/file/a/b'" in reported
    assert "Not a directory" in reported


def test_a_folder_that_cannot_be_written_to_is_named_by_its_variable(checkpoint, tmp_path, monkeypatch):
    """Even root cannot create files in /proc."""
    with pytest.raises(ConfigError, match="EXPORT_CACHE_DIR is '/proc': .* '/proc/"):
        model_source.export(checkpoint("qwen2"), Path("/proc"))
    into = "fetching a/b into MODEL_DIR, which is '/proc': .* '/proc/a.*; set MODEL_DIR to another folder"
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
    assert "which does not exist. Set MODEL_DIR to a checkpoint or an exported model, or name one" in done.stdout
    assert RunDir(server.run_dir).read_state() is None


def test_a_model_that_cannot_be_exported_says_why(server, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    done = server.command("start_server")
    assert done.returncode == 1
    assert "failed: exporting" in done.stdout
    assert "model.safetensors is missing" in done.stdout


def test_a_malformed_model_name_is_refused_with_the_right_form(server):
    done = server.command("start_server", "not-a-name")
    assert done.returncode == 1
    assert "model_name is 'not-a-name', it must be org/model" in done.stdout
    assert "A folder is given as a path: start_server ./not-a-name" in done.stdout


def test_a_folder_that_is_missing_is_reported_as_missing(server):
    done = server.command("start_server", "--model", "./missing")
    assert done.returncode == 1
    assert f"the model is the folder {os.getcwd()}/missing, which does not exist. Set MODEL_DIR" in done.stdout
    for given in ("./missing", "missing/", f"{os.getcwd()}/missing"):
        assert model_source.local_folder(given, "models") == Path("missing").absolute()


def test_a_file_and_a_precision_behind_a_folder_are_said_to_be_no_folder(server, tmp_path):
    (tmp_path / "model.safetensors").touch()
    said = server.command("start_server", str(tmp_path / "model.safetensors")).stdout
    assert "model.safetensors, which is a file but no .gguf file; the model is the folder that has config.json" in said
    said = server.command("start_server", str(tmp_path / "a8w8")).stdout
    assert "does not exist; the precision of a model in a folder is an option: --quant-type a8w8." in said


def test_a_folder_is_served_by_its_path_and_what_was_fetched_before_by_its_name(tmp_path, monkeypatch):
    for folder in ("a_model", "org/model", "fetched/org/name", "empty/folder"):
        (tmp_path / folder).mkdir(parents=True)
        if folder != "empty/folder":
            (tmp_path / folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for name in ("./a_model", "a_model", "a_model/", f"{tmp_path}/a_model", "../" + tmp_path.name + "/a_model"):
        folder = model_source.local_folder(name, "fetched")
        assert folder and folder.is_absolute() and folder.resolve() == tmp_path / "a_model"
        monkeypatch.chdir(ROOT)  # where the server runs
        assert model_source.find_source(Config(), str(folder), print).label == "a_model"
        monkeypatch.chdir(tmp_path)
    assert model_source.local_folder("org/model", "fetched") == tmp_path / "org" / "model"
    monkeypatch.chdir(tmp_path / "fetched")
    for name in ("org/name", "org/other", "empty/folder", ""):
        assert model_source.local_folder(name, str(tmp_path / "fetched")) is None


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


def test_limits_of_pixels_that_the_model_cannot_keep_are_named(exported, monkeypatch):
    monkeypatch.setenv("MM_PROCESSOR_KWARGS", '{"max_pixels": 100}')
    with pytest.raises(ConfigError, match="MM_PROCESSOR_KWARGS does not fit the model: min_pixels is .* is 100: max_"):
        model_source.check_settings(exported("qwen2_5_vl"))


@pytest.mark.parametrize(
    ("env", "trouble"),
    [
        ({"SWAP_SPACE": "1"}, "SWAP_SPACE is 1, but on the CPU the KV cache is in the host's memory itself"),
        ({"MP_NUM": "2"}, "MP_NUM is 2, {graph_dir} was exported for 1; set MP_NUM=1"),
        ({"LORA_MODULES": "a=/none"}, "LORA_MODULES: adapter /none: adapter_config.json cannot be read"),
    ],
)
def test_a_setting_that_does_not_fit_the_model_is_named(exported, env, trouble, monkeypatch):
    for name, value in {"DEVICE": "cpu", **env}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as raised:
        model_source.check_settings(exported("qwen2"))
    assert str(raised.value).startswith(trouble.format(graph_dir=exported("qwen2")))


def test_a_setting_that_does_not_fit_the_model_is_status_2_before_anything_is_started(server, exported):
    """The model's name, which is the folder's, is known to the command alone."""
    server.env.update({"DEVICE": "cpu", "MODEL_DIR": str(exported("qwen2")), "LORA_MODULES": "qwen2=/none"})
    done = server.command("start_server")
    assert done.returncode == 2
    assert done.stderr.startswith("start_server: LORA_MODULES has 'qwen2', which is the model's own name")
    assert "starting the engine" not in done.stdout


def test_an_unknown_quantization_is_refused_before_anything_is_fetched(server):
    with ModelServer() as hub:
        server.env["HF_ENDPOINT"] = hub.url
        done = server.command("start_server", "org/model/a8w8_int3")
        assert hub.requests == []
    assert done.returncode == 1
    assert "model_name ends in 'a8w8_int3', the quantizations are: weight_only_int8, " in done.stdout


def test_an_architecture_that_is_not_built_is_refused_before_its_weights_are_fetched(server):
    with ModelServer() as hub:
        hub.add_repo("org/model", {"config.json": b'{"model_type": "bloom"}', "model.safetensors": b"weights"})
        server.env["HF_ENDPOINT"] = hub.url
        done = server.command("start_server", "org/model")
        assert not any("safetensors" in path for _, path, _ in hub.requests)
    assert done.returncode == 1
    assert "failed: fetching org/model: config.json: model_type is 'bloom', supported are llama" in done.stdout


def test_a_draft_model_is_fetched_by_its_name_and_read_from_where_it_is(tmp_path, monkeypatch):
    config = Config(model_dir=str(tmp_path), speculate_method="draft", speculate_model_path="org/small")
    assert config.draft_model_path == tmp_path / "org/small"
    with ModelServer() as hub:
        files = {path.name: path.read_bytes() for path in (ROOT / "demo_model/draft").iterdir()}
        hub.add_repo("org/small", files)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        model_source.fetch_draft_model(config, lambda text: None)
        num_requests = len(hub.requests)
        model_source.fetch_draft_model(replace(config, speculate_model_path=str(tmp_path / "org/small")), print)
        assert len(hub.requests) == num_requests
    assert {name: (config.draft_model_path / name).read_bytes() for name in files} == files
    assert "SPECULATE_MODEL_PATH" not in start.absolute_paths(config)
    monkeypatch.chdir(tmp_path)  # a folder of this name comes first
    assert (config.draft_model_name, config.draft_model_path) == ("", tmp_path / "org/small")


def test_a_second_start_says_what_runs(server, tmp_path):
    with fake_server(tmp_path, ALL) as running:
        running.wait_until_ready()
        done = server.command("start_server")
        assert done.returncode == 1
        assert done.stdout.startswith("start_server: a server is already running\n")
        assert f"fake is ready, pid {running.process.pid}, since " in done.stdout
        run_dir = RunDir(server.run_dir)
        run_dir.write_state(replace(run_dir.read_state(), phase="stopping"))
        done = server.command("start_server")
        assert (done.returncode, "a server is stopping, start again when it has stopped\n" in done.stdout) == (1, True)
        assert running.process.poll() is None


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
                assert state.model == "org/model"
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
            assert start.wait(25) == 128 + signal.SIGTERM  # after 30 s the download asks again
            assert "interrupted, nothing is left running" in start.stdout.read()
    assert RunDir(server.run_dir).read_state() is None


@pytest.mark.parametrize("command", ["start_server", "stop_server", "run_batch"])
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback(command):
    program = f"""
import os, signal, sys
class Interrupting:
    @staticmethod
    def find_spec(name, *_):
        if name == "engine.errors":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting)
signal.signal(signal.SIGINT, signal.default_int_handler)
from server_scripts.commands import {command}
sys.exit({command}())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


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
        export_if_needed(config, ModelSource(tmp_path, "m"), interrupt)
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
    slow = "{'server_scripts.probe', 'engine.wire', 'http.client', 'importlib.metadata'}"  # half of the time of --help
    code = f"import sys; from server_scripts import start, stop; print(sys.modules.keys() & {slow});"
    code += f"from server_scripts import serve; print(sys.modules.keys() & {unwanted})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\nset()\n"


@pytest.mark.parametrize("name", ["start_server", "stop_server"])
def test_the_commands_work_without_an_installation_and_through_a_link(tmp_path, name):
    (tmp_path / name).symlink_to(ROOT / "server_scripts" / name)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / name, "--help"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {name}")
