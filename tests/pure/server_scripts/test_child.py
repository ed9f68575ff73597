"""A child of the supervisor: when it is started again, and how its end is described."""

import os
import signal
import time
from pathlib import Path

import pytest

from engine.errors import HostLost
from server_scripts import child as child_module
from server_scripts.child import HEALTHY_AFTER_S, MAX_BACK_OFF_S, Child, ChildSpec, back_off, describe_exit
from server_scripts.run_dir import Process, ProcessStat, children_of
from tests.patience import wait_until


@pytest.fixture
def child():
    return Child(ChildSpec("engine", [], {}, Path(), max_crashes=3, progress_file=Path("/no/progress")))


def test_a_child_that_has_ended_is_due_at_once_and_later_the_second_time(child):
    child.process = object()
    child.record_end(signal.SIGKILL)
    assert child.process is None
    assert child.restart_at <= time.monotonic()
    assert (child.num_crashes, child.exit_reason) == (1, "was killed by SIGKILL")
    before = time.monotonic()
    child.record_end(signal.SIGKILL)
    assert child.restart_at >= before + back_off(2)


def test_crashes_that_are_far_apart_do_not_add_up(child):
    for _ in range(10):
        child.healthy_since = time.monotonic() - HEALTHY_AFTER_S
        child.restart_at = None
        child.record_end(signal.SIGKILL)
        assert (child.num_crashes, child.restart_at is None) == (1, False)


def test_crashes_soon_after_each_other_add_up_until_it_is_given_up(child):
    for number in (1, 2, 3):
        child.healthy_since = time.monotonic()
        child.restart_at = None
        child.record_end(signal.SIGKILL)
        assert (child.num_crashes, child.restart_at is None) == (number, number == 3)


def test_an_engine_that_has_computed_tokens_since_its_start_is_started_again_at_once(tmp_path):
    progress = tmp_path / "progress"
    child = Child(ChildSpec("engine", ["true"], {}, tmp_path / "log", max_crashes=3, progress_file=progress))
    for has_progressed, number in ((False, 1), (False, 2), (True, 1), (True, 1), (False, 2)):
        child.start()
        assert not progress.exists()  # it was the one's before
        if has_progressed:
            progress.touch()
        child.record_end(signal.SIGKILL)
        assert child.num_crashes == number
        assert (child.restart_at <= time.monotonic()) == (number == 1)


def test_a_process_learns_whether_one_before_it_has_served(tmp_path):
    """A decode instance that is started again serves without prefill instances that refuse it by now."""
    log, progress = tmp_path / "log", tmp_path / "progress"
    child = Child(ChildSpec("engine", ["sh", "-c", "echo is back: $ENGINE_IS_BACK"], {}, log, progress_file=progress))
    for has_progressed in (False, True, False):
        child.start()
        os.waitpid(child.process.pid, 0)
        if has_progressed:
            progress.touch()
        child.record_end(1)
    child.start()
    os.waitpid(child.process.pid, 0)
    assert log.read_text() == "is back:\n" * 2 + "is back: 1\n" * 2


@pytest.fixture
def crash(tmp_path):
    """Return a function that ends an engine which was computing a single request, and returns the crashes that
    count.
    """
    suspect, progress = tmp_path / "suspect", tmp_path / "progress"
    files = {"progress_file": progress, "suspect_file": suspect}
    child = Child(ChildSpec("engine", ["true"], {}, tmp_path / "log", max_crashes=3, **files))

    def crash(name=None, has_progressed=False):
        child.start()
        assert not suspect.exists()  # the process was announced before
        if name:
            suspect.write_text(name)
        if has_progressed:
            progress.touch()
        child.record_end(signal.SIGSEGV)
        return child.num_crashes

    return crash


def test_a_crash_that_a_request_is_to_blame_for_does_not_count(crash):
    assert [crash(), crash("a"), crash("a")] == [1, 1, 0]
    for _ in range(10):
        assert [crash(), crash("a"), crash("a")] == [1, 0, 0]
    assert [crash(), crash("b"), crash(), crash()] == [1, 1, 2, 3]


def test_eight_requests_that_crash_the_engine_are_not_to_blame(crash, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(child_module.time, "monotonic", lambda: now[0])
    names = iter("abcdefghijklmnopqrstuvwxyz")
    assert [crash(next(names)) for _ in range(7)] == [0] * 7
    now[0] += 200
    assert crash(next(names), has_progressed=True) == 8
    now[0] += 101
    assert crash(has_progressed=True) == 1  # seven are forgotten
    assert [crash(next(names)) for _ in range(6)] == [1] * 6
    now[0] += 1000  # nothing was computed meanwhile
    assert crash(next(names)) == 8


def test_another_child_that_has_answered_since_its_start_is_started_again_at_once():
    child = Child(ChildSpec("tritonserver", [], {}, Path()))
    for was_healthy, number in ((False, 1), (False, 2), (True, 1), (True, 1)):
        child.healthy_since = time.monotonic() if was_healthy else None
        child.record_end(signal.SIGKILL)
        assert child.num_crashes == number


@pytest.mark.parametrize(("program", "is_found"), [("", True), (Path("/bin/sleep").resolve().name, True), ("x", False)])
def test_a_helper_is_known_by_its_program(tmp_path, program, is_found):
    child = Child(ChildSpec("parent", ["sh", "-c", "sleep 600 & wait"], {}, tmp_path / "log", helper_program=program))
    child.start()
    try:
        wait_until(
            lambda: [
                pid
                for pid in children_of(child.process.pid)
                if Path(f"/proc/{pid}/exe").readlink().name == Path("/bin/sleep").resolve().name
            ]
        )
        child.find_helpers()
        assert len(child.helpers) == is_found
    finally:
        child.kill()
        os.waitpid(child.process.pid, 0)


def test_a_host_that_was_lost_is_no_crash(child):
    child.record_end(signal.SIGKILL)
    for _ in range(10):
        child.healthy_since = now = time.monotonic()
        assert child.record_end(HostLost.exit_status << 8) is False
        assert (child.num_crashes, child.process, child.healthy_since) == (1, None, None)
        assert child.restart_at > now
    assert child.record_end(signal.SIGKILL) is True
    assert child.num_crashes == 2


def test_a_child_that_could_not_be_started_is_tried_again_later(tmp_path):
    (tmp_path / "file").touch()
    child = Child(ChildSpec("engine", ["true"], {}, tmp_path / "file" / "engine.log"))
    child.start()
    assert child.process is None
    assert child.restart_at > time.monotonic()
    assert child.exit_reason.startswith("could not be started: ")


def test_the_first_restart_is_at_once_and_later_ones_wait_longer():
    assert [back_off(number) for number in (1, 2, 3, 4, 5)] == [0, 0.25, 0.5, 1, 2]
    assert back_off(50) == MAX_BACK_OFF_S


def test_an_exit_is_described_by_status_or_signal():
    assert describe_exit(7 << 8) == "ended with exit status 7"
    assert describe_exit(signal.SIGSEGV) == "was killed by SIGSEGV"


def test_a_process_that_is_stopped_again_and_again_is_not_stopped_for_long(monkeypatch):
    now, state = 0.0, "T"
    child = Child(ChildSpec("gateway-0", [], {}, Path()), Process("gateway-0", 1, 0))
    monkeypatch.setattr(child_module, "read_stat", lambda pid: ProcessStat(state, 0, 0, 1))
    monkeypatch.setattr(child_module.time, "monotonic", lambda: now)
    for now, state in ((5, "T"), (19, "T"), (20, "S"), (21, "T"), (36, "T")):  # noqa: B007
        assert not child.check_stopped_for_long()
    now = 36.5
    assert child.check_stopped_for_long()
