"""The run directory is private, its lock says whether a server runs, and a recycled pid is never taken for ours."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.settings.processes import ProcessSettings
from server_scripts.report import summary
from server_scripts.run_dir import Process, RunDir, ServerState, children_of, read_stat, stop_command
from tests.patience import wait_until


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def a_state(*processes):
    supervisor = Process("supervisor", 1, 2)
    return ServerState("ready", supervisor, 3.0, "m", "0.0.0.0", {"A": 1}, "/log", 9.0, list(processes))


def test_the_command_that_stops_a_server_names_its_folder_unless_it_is_the_default():
    assert stop_command(ProcessSettings().run_path, "/somewhere/log") == "stop_server"
    run_path = ProcessSettings(log_dir="/my logs").run_path
    assert stop_command(run_path, "/my logs") == "FD_LOG_DIR='/my logs' stop_server"
    assert stop_command(Path("/run/mine"), "/my logs") == "RUN_DIR=/run/mine stop_server"
    assert summary(a_state(), Path("/run/mine")).endswith("stop     RUN_DIR=/run/mine stop_server")


def test_the_folder_is_made_for_its_user_alone(tmp_path):
    run_dir = RunDir(tmp_path / "a" / "run")
    assert run_dir.path.stat().st_mode & 0o777 == 0o700


def test_a_full_disk_is_named_with_the_file(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    (run_dir.path / "state.json.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/run/state\.json\.partial'"):
        run_dir.write_state(a_state())


def test_a_link_in_its_place_is_refused(tmp_path):
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "run").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match=r"RUN_DIR is '.*run', it must be a folder, not a link or a file"):
        RunDir(tmp_path / "run")


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(ConfigError, match="must belong to this user and not be writable by others"):
        RunDir(tmp_path / "run")


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "run").stat().st_uid + 1)
    with pytest.raises(ConfigError, match="must belong to this user"):
        RunDir(tmp_path / "run")


def test_the_lock_is_held_by_one_and_goes_with_it(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    handle = run_dir.lock()
    assert handle is not None
    num_open = len(os.listdir("/proc/self/fd"))
    assert run_dir.lock() is None
    assert len(os.listdir("/proc/self/fd")) == num_open
    os.close(handle)
    again = run_dir.lock()
    assert again is not None
    os.close(again)


def test_the_state_comes_back_as_it_was_written(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    assert run_dir.read_state() is None
    state = a_state(Process("engine", 4, 5))
    run_dir.write_state(state)
    assert run_dir.read_state() == state
    run_dir.clean_up()
    assert run_dir.read_state() is None


def test_two_run_directories_never_share_a_prefix_in_shared_memory(tmp_path):
    first, second = RunDir(tmp_path / "a"), RunDir(tmp_path / "b")
    assert first.shm_prefix == RunDir(tmp_path / "a").shm_prefix != second.shm_prefix


def test_files_that_cleaners_of_tmp_would_remove_are_touched(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    (run_dir.path / "link").symlink_to("/nowhere")
    os.utime(run_dir.path / "link", (1, 1), follow_symlinks=False)
    run_dir.touch_all()
    assert (run_dir.path / "link").lstat().st_mtime > 1


def test_a_process_is_known_while_it_lives(sleeper):
    process = Process.of("sleeper", sleeper.pid)
    assert process.is_alive
    assert sleeper.pid in children_of(os.getpid())
    process.kill(signal.SIGTERM)
    sleeper.wait()
    assert not process.is_alive
    process.kill()
    assert Process.of("sleeper", sleeper.pid) is None


def test_a_process_name_that_is_cut_within_a_character_is_read(tmp_path):
    """The kernel keeps 15 bytes of a name, and any process may have such a name."""
    program = tmp_path / ("\u0430" * 8)
    program.symlink_to(shutil.which("sleep"))
    with subprocess.Popen([program, "600"]) as process:
        try:
            assert process.pid in children_of(os.getpid())
            assert Process.of("cut", process.pid).is_alive
        finally:
            process.kill()


def test_a_zombie_is_not_alive(sleeper):
    process = Process.of("sleeper", sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not process.is_alive


def test_a_process_whose_first_thread_alone_has_ended_is_alive():
    """It is killed, but still holds its ports."""
    code = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); "
    code += "print(flush=True); ctypes.CDLL(None).pthread_exit(None)"
    ending = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with ending:
        ending.stdout.readline()
        process = Process.of("ending", ending.pid)
        wait_until(lambda: read_stat(ending.pid).state == "Z")
        assert process.is_alive
        ending.kill()
    assert not process.is_alive


def test_a_recycled_pid_is_not_killed(sleeper):
    recorded = Process("an earlier process", sleeper.pid, Process.of("", sleeper.pid).start_time - 1)
    assert not recorded.is_alive
    recorded.kill()
    assert sleeper.poll() is None
