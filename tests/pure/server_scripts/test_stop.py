"""stop_server as a command: what it ends, what it waits for, what it says, and its exit status."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from server_scripts import stop as stop_module
from server_scripts.run_dir import Process, RunDir, ServerState
from tests.pure.fake_server import ALL, TIMEOUT_S, fake_server, kill_supervisor
from tests.server import is_alive

pytestmark = pytest.mark.slow  # processes are started

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "server_scripts.stop"]


def env_of(folder):
    return {**os.environ, "RUN_DIR": str(folder / "run"), "SERVICE_GRPC_PORT": "not for stop_server to judge"}


def stop(folder, *arguments):
    return subprocess.run(
        [*COMMAND, *arguments], env=env_of(folder), cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def assert_none_was_running(done):
    assert done.returncode == 0
    first, *others = done.stdout.splitlines()
    assert first.startswith("stop_server: no server was running in RUN_DIR, which is /")
    assert all(line.startswith("stop_server: another one runs (pid ") for line in others)  # this machine's, not ours


def test_stop_ends_everything_and_is_harmless_twice(tmp_path):
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        processes = server.state.processes
        done = stop(tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"stop_server: stopping fake (pid {server.process.pid})\n")
        assert not any(process.is_alive for process in processes)
        assert server.process.wait(60) == 0
    assert_none_was_running(stop(tmp_path))


def test_stop_where_no_server_ever_was_makes_no_folder(tmp_path):
    assert_none_was_running(stop(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_lock_without_a_state_file_is_named_with_the_command_that_finds_its_owner(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stop_module, "FIND_S", 0.0)
    run_dir = RunDir(tmp_path / "run")
    lock = run_dir.lock()
    assert stop_module.stop(RunDir(tmp_path / "run"), None) == 1
    os.close(lock)
    assert f"`fuser {tmp_path}/run/lock` shows their pids" in capsys.readouterr().err


def test_stop_names_the_servers_with_another_run_directory(tmp_path, capsys):
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        pid = server.state.supervisor.pid
        stop_module.report_no_server(tmp_path / "none", folder=tmp_path / "r")
    expected = f"stop_server: another one runs (pid {pid}): RUN_DIR={tmp_path / 'run'} stop_server"
    assert capsys.readouterr().out.splitlines() == [
        f"stop_server: no server was running in RUN_DIR, which is {tmp_path / 'none'}",
        expected,
    ]


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
    with fake_server(tmp_path, ALL | {"gateway-0": "stubborn", "gateway-1": ""}, drain_timeout_s=600) as server:
        server.wait_until_ready()
        with subprocess.Popen(COMMAND, env=env_of(tmp_path), cwd=ROOT, stdout=-1, stderr=-1, text=True) as stopping:
            server.wait_until(lambda: "gateway-1 ended" in server.notes)
            stopping.send_signal(signal.SIGINT)
            _, said = stopping.communicate(timeout=TIMEOUT_S)
        assert stopping.returncode == 130
        assert said == "\nstop_server: interrupted; a server that was asked to stop continues to stop\n"
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
    with fake_server(tmp_path, ALL | {"gateway-0": "stubborn"}, drain_timeout_s=600) as server:
        server.wait_until_ready()
        with subprocess.Popen(COMMAND, env=env_of(tmp_path), cwd=ROOT, stdout=subprocess.DEVNULL) as first:
            server.wait_until(lambda: server.state.phase == "stopping")
            with subprocess.Popen(COMMAND, env=env_of(tmp_path), cwd=ROOT, stdout=subprocess.PIPE, text=True) as second:
                second.stdout.readline()
                assert second.stdout.readline().startswith("stop_server: waiting for ")
                assert server.process.poll() is None
                assert stop(tmp_path, "0").returncode == 0
                assert (first.wait(TIMEOUT_S), second.wait(TIMEOUT_S)) == (0, 0)


def test_stop_finds_a_start_that_has_only_just_begun(tmp_path):
    """It has the lock, but has not published its process id yet."""
    run_dir = RunDir(tmp_path / "run")
    lock = run_dir.lock()
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], pass_fds=[lock]) as start:
        os.close(lock)
        with subprocess.Popen(COMMAND, env=env_of(tmp_path), cwd=ROOT, stdout=subprocess.DEVNULL) as stopping:
            try:
                with pytest.raises(subprocess.TimeoutExpired):
                    stopping.wait(1.0)
                me = Process.of("supervisor", start.pid)
                run_dir.write_state(ServerState("preparing", me, 0.0, "m", "", {}, "", 5.0))
                assert start.wait(TIMEOUT_S) == -signal.SIGTERM
                assert stopping.wait(TIMEOUT_S) == 0
            finally:
                start.kill()


def test_stop_leaves_a_server_alone_that_was_started_since(tmp_path, monkeypatch):
    run_dir = RunDir(tmp_path / "run")
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(sleep) as old, subprocess.Popen(sleep) as new:
        state = ServerState("ready", Process.of("", old.pid), 0.0, "m", "", {}, "", 5.0)
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
            run_dir.write_state(ServerState("ready", gone, 0.0, "m", "", {}, "", 5.0, left))
            assert stop(tmp_path).returncode == 0
            assert ours.wait(60) == -signal.SIGKILL
            assert other.poll() is None
        finally:
            ours.kill()
            other.kill()
