"""The supervisor, with fake children and fake answers: order, restarts, limits, and an end that leaves nothing."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import pytest

from engine.settings.processes import ENGINE_FAILED_FILE
from server_scripts.child import ROOT
from tests.pure.fake_server import ALL, READY, TIMEOUT_S, fake_server
from tests.server import is_alive

pytestmark = pytest.mark.slow  # processes are started


def test_the_gateway_stops_first(tmp_path):
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 0
        ended = [line for line in server.notes if line.endswith("ended")]
        assert ended[0] == "gateway-0 ended"
        assert set(ended[1:]) == {"engine ended", "health ended"}  # tritonserver is killed


def test_nothing_is_left_after_the_end_not_even_orphans(tmp_path):
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        pids = [process.pid for process in server.state.processes]
        shm = tmp_path / "shm" / f"{server.run_dir.shm_prefix}test"
        shm.touch()
        other = shm.with_name(f"other_{shm.name}")
        other.touch()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 0
        assert not any(map(is_alive, pids))
        assert not shm.exists()
        assert other.exists()
        assert server.state is None


def test_nothing_is_left_after_a_shutdown_that_fails(tmp_path):
    with fake_server(tmp_path, ALL | {"engine": "with helper"}) as server:
        server.wait_until_ready()
        pids = [server.noted_pid("engine"), *(process.pid for process in server.state.processes)]
        server.answer(**READY, num_open="a bug")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 1
        assert "ValueError" in server.log
        assert not any(map(is_alive, pids))
        assert server.state is None


def test_a_crash_takes_what_the_child_has_started_with_it(tmp_path):
    with fake_server(tmp_path, ALL | {"engine": "with helper"}) as server:
        server.wait_until_ready()
        helper = server.noted_pid("engine")
        server.wait_until_replaced("engine", server.kill("engine"))
        server.wait_until(lambda: not is_alive(helper))


def test_children_lead_groups_for_signals_in_one_session_for_the_cores(tmp_path):
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        pids = [server.pid_of(name) for name in ALL]
        assert [os.getpgid(pid) for pid in pids] == pids
        if sys.version_info >= (3, 11):
            assert {os.getsid(pid) for pid in pids} == {os.getsid(server.process.pid)}


def test_orphans_that_have_left_their_session_end_with_the_server(tmp_path):
    with fake_server(tmp_path, ALL | {"engine": "with daemon"}) as server:
        server.wait_until_ready()
        daemon = server.noted_pid("engine")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 0
        assert not is_alive(daemon)


def test_a_child_that_dies_is_started_again(tmp_path):
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        for name in ALL:
            server.wait_until_replaced(name, server.kill(name))
            server.wait_until(lambda name=name: server.notes.count(f"{name} started") == 2)
        assert server.process.poll() is None


def test_the_engine_is_given_up_after_too_many_crashes_and_the_reason_is_written(tmp_path):
    failed = tmp_path / "run" / ENGINE_FAILED_FILE
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        for number in (1, 2, 3):
            server.wait_until(lambda number=number: server.notes.count("engine started") == number)
            assert not failed.exists()
            server.kill("engine")
        server.wait_until(failed.exists)
        assert failed.read_text() == "the engine was killed by SIGKILL, 3 times in a row"
        assert server.notes.count("engine started") == 3
        assert server.process.poll() is None  # the others go on, to say why


def test_an_engine_that_loses_another_host_fails_no_start_and_is_never_given_up(tmp_path):
    with fake_server(tmp_path, ALL | {"engine": "losing a host"}) as server:
        server.wait_until(lambda: server.notes.count("engine started") == 5)
        server.wait_until_ready()
        assert not (tmp_path / "run" / ENGINE_FAILED_FILE).exists()
        assert server.log.count("engine has lost another machine, and is going to wait for it") == 4


def test_the_reason_of_an_earlier_run_is_forgotten_at_the_start(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / ENGINE_FAILED_FILE).write_text("long ago")
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        assert not (tmp_path / "run" / ENGINE_FAILED_FILE).exists()


def test_a_dead_helper_of_tritonserver_restarts_it(tmp_path):
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        pid = server.pid_of("tritonserver")
        server.kill("tritonserver helper")
        server.wait_until_replaced("tritonserver", pid)
        server.wait_until(lambda: server.pid_now("tritonserver helper"))


def test_a_helper_of_tritonserver_that_dies_before_the_model_answers_again_restarts_it(tmp_path):
    with fake_server(tmp_path, ALL, ask_every_s=TIMEOUT_S) as server:
        server.wait_until_ready()
        server.answer()
        pid = server.wait_until_replaced("tritonserver", server.kill("tritonserver"))
        server.kill("tritonserver helper")
        server.wait_until_replaced("tritonserver", pid)


def test_a_tritonserver_that_was_restarted_is_asked_at_once_whether_it_answers(tmp_path):
    """Otherwise one that ends again soon would count as one that has never answered, and its restart would be
    delayed.
    """
    with fake_server(tmp_path, ALL, ask_every_s=TIMEOUT_S) as server:
        server.wait_until_ready()
        num_asked = server.num_asked
        server.wait_until_replaced("tritonserver", server.kill("tritonserver"))
        server.wait_until(lambda: server.num_asked > num_asked)


def test_a_dead_rank_is_left_to_the_engine_which_ends_and_says_why(tmp_path):
    with fake_server(tmp_path, ALL | {"engine": "with helper"}, mp_num=2) as server:
        server.wait_until_ready()
        server.kill("engine helper")
        num_asked = server.num_asked
        server.wait_until(lambda: server.num_asked > num_asked + 10)
        assert server.notes.count("engine started") == 1


def test_a_silent_model_restarts_tritonserver(tmp_path):
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        pid = server.pid_of("tritonserver")
        server.answer()
        server.wait_until_replaced("tritonserver", pid)
        assert "no answer from the model" in server.log
        num_asked = server.num_asked
        server.wait_until(lambda: server.num_asked > num_asked + 10)
        assert server.notes.count("tritonserver started") == 2  # the new one is loading and may be silent
        server.answer(**READY)


@pytest.mark.parametrize("name", ["gateway-0", "tritonserver helper", "engine helper"])
def test_a_process_that_is_stopped_for_too_long_is_started_anew(tmp_path, name):
    """Ranks are helper processes of the engine."""
    with fake_server(tmp_path, ALL | {"engine": "with helper"}, mp_num=2) as server:
        server.wait_until_ready()
        server.wait_until(lambda: server.pid_now(name))
        pid, owner = server.pid_of(name), name.removesuffix(" helper")
        os.kill(pid, signal.SIGSTOP)
        server.wait_until_replaced(name, pid)
        assert f"{owner} has been stopped for too long; ending it" in server.log


def test_the_shared_memory_of_a_dead_tritonserver_is_removed(tmp_path):
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        shm = tmp_path / "shm" / f"{server.run_dir.shm_prefix}test"
        shm.touch()
        for name, is_left in (("engine", True), ("tritonserver", False)):
            server.wait_until_replaced(name, server.kill(name))
            assert shm.exists() == is_left


def test_an_engine_that_is_in_one_step_for_too_long_is_restarted(tmp_path):
    with fake_server(tmp_path, ALL, check_health_interval_s=1.0) as server:
        server.wait_until_ready()
        pid = server.pid_of("engine")
        server.answer(state={"ready": False, "engine_silent_s": 0.0, "engine_step_s": 5.0})
        server.wait_until_replaced("engine", pid)
        assert server.notes.count("tritonserver started") == 1


def test_a_child_that_fails_during_the_start_fails_the_start_with_its_last_words(tmp_path):
    with fake_server(tmp_path, ALL | {"engine": "failing"}, answers={}) as server:
        assert server.process.wait(TIMEOUT_S) == 1
        assert "failed: engine ended with exit status 7" in server.log
        assert "the last words of a failing child" in server.log
        assert server.state is None


@pytest.mark.parametrize("num_aborts", [2, 3])
def test_a_tritonserver_that_aborts_during_the_start_is_started_twice_more(tmp_path, num_aborts):
    with fake_server(tmp_path, ALL, answers={}) as server:
        pid = server.wait_until(lambda: server.pid_now("tritonserver"))
        for _ in range(2):
            os.kill(pid, signal.SIGABRT)
            pid = server.wait_until_replaced("tritonserver", pid)
        if num_aborts == 3:
            os.kill(pid, signal.SIGABRT)
            assert server.process.wait(TIMEOUT_S) == 1
            assert "failed: tritonserver was killed by SIGABRT" in server.log
        else:
            server.answer(**READY)
            server.wait_until_ready()


def test_a_start_that_takes_too_long_fails(tmp_path):
    state = {"ready": False, "reason": "the engine is starting", "engine_silent_s": 1e9}
    for limit_s in (1, 4, 16):  # on a busy machine no process may be up after one second
        folder = tmp_path / str(limit_s)
        folder.mkdir()
        with fake_server(folder, ALL, {"state": state}, start_timeout_s=float(limit_s)) as server:
            assert server.process.wait(TIMEOUT_S) == 1
            assert f"failed: not ready after START_TIMEOUT, {limit_s} s" in server.log
            if "tritonserver is up, the engine is starting" in server.log:
                return
    raise AssertionError(server.log)


def test_a_port_that_does_not_answer_fails_the_start(tmp_path):
    answers = {**READY, "check_error": "port 9965: connection refused"}
    with fake_server(tmp_path, ALL, answers, check_for_s=0.2) as server:
        assert server.process.wait(TIMEOUT_S) == 1
        assert "a request was not answered: port 9965: connection refused" in server.log


def test_a_child_that_does_not_end_is_killed(tmp_path):
    with fake_server(tmp_path, ALL | {"gateway-0": "stubborn"}, drain_timeout_s=-9.5) as server:
        server.wait_until_ready()
        pid = server.pid_of("gateway-0")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 0
        assert not is_alive(pid)
        assert "gateway-0 has not ended in time, killing it" in server.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])  # SIGTERM is that of the tests above
def test_every_stop_signal_ends_the_server(tmp_path, number):
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        server.process.send_signal(number)
        assert server.process.wait(TIMEOUT_S) == 0


def test_processes_that_the_tests_start_under_nohup_take_sighup():
    read = "import subprocess; subprocess.run(['grep', 'SigIgn', '/proc/self/status'])"
    command = ["nohup", sys.executable, "-c", f"from tests import conftest; conftest.pytest_configure(); {read}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not int(done.stdout.split()[1], 16) & 1 << signal.SIGHUP - 1


def test_nohup_keeps_a_server_running(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with fake_server(tmp_path, ALL) as server:
            server.wait_until_ready()
            health = server.pid_of("health")
            server.process.send_signal(signal.SIGHUP)
            os.kill(health, signal.SIGKILL)
            server.wait_until(lambda: server.notes.count("health started") == 2)
            assert server.process.poll() is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_second_signal_insists(tmp_path):
    with fake_server(tmp_path, ALL | {"gateway-0": "stubborn", "gateway-1": ""}, drain_timeout_s=600) as server:
        server.wait_until_ready()
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: "gateway-1 ended" in server.notes)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 0


def test_a_server_survives_a_run_directory_and_a_log_folder_that_disappear(tmp_path):
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        engine = server.pid_of("engine")
        shutil.rmtree(tmp_path / "run")
        os.kill(engine, signal.SIGKILL)
        server.wait_until(lambda: server.notes.count("engine started") == 2)
        assert "the state file could not be written" in server.log
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 0


def test_a_server_that_cannot_say_that_it_is_ready_fails_its_start(tmp_path):
    """This happens on a full disk; start_server would otherwise wait for the end of the server."""
    with fake_server(tmp_path, ALL, answers={}) as server:
        server.wait_until(lambda: {"engine started", "tritonserver started"} <= set(server.notes))
        partial = tmp_path / "run" / "state.json.partial"

        def is_in_the_way():
            with contextlib.suppress(FileExistsError):  # it is written just now
                partial.mkdir()
            return partial.is_dir()

        server.wait_until(is_in_the_way)
        server.answer(**READY)
        assert server.process.wait(TIMEOUT_S) == 1
        assert "failed: the state file in " in server.log
