"""A child of the supervisor: when it is started again, and how its end is described."""

import signal
import time
from pathlib import Path

import pytest

from engine.errors import HostLost
from server_scripts import child as child_module
from server_scripts.child import HEALTHY_AFTER_S, MAX_BACK_OFF_S, Child, ChildSpec, back_off, describe_exit
from server_scripts.run_dir import Process, Stat


@pytest.fixture
def child():
    return Child(ChildSpec("engine", [], {}, Path(), max_crashes=3, progress_file=Path("/no/progress")))


def test_a_child_that_has_ended_is_due_at_once_and_later_the_second_time(child):
    child.process = object()
    child.has_ended(signal.SIGKILL)
    assert child.process is None
    assert child.restart_at <= time.monotonic()
    assert (child.num_crashes, child.last_words) == (1, "was killed by SIGKILL")
    child.has_ended(signal.SIGKILL)
    assert child.restart_at > time.monotonic() + back_off(2) - 0.5


def test_crashes_that_are_far_apart_do_not_add_up(child):
    for _ in range(10):
        child.healthy_since = time.monotonic() - HEALTHY_AFTER_S
        child.restart_at = None
        child.has_ended(signal.SIGKILL)
        assert (child.num_crashes, child.restart_at is None) == (1, False)


def test_crashes_soon_after_each_other_add_up_until_it_is_given_up(child):
    for number in (1, 2, 3):
        child.healthy_since = time.monotonic()
        child.restart_at = None
        child.has_ended(signal.SIGKILL)
        assert (child.num_crashes, child.restart_at is None) == (number, number == 3)


def test_an_engine_that_has_computed_tokens_since_its_start_is_started_again_at_once(tmp_path):
    progress = tmp_path / "progress"
    child = Child(ChildSpec("engine", ["true"], {}, tmp_path / "log", max_crashes=3, progress_file=progress))
    for has_progressed, number in ((False, 1), (False, 2), (True, 1), (True, 1), (False, 2)):
        child.start()
        assert not progress.exists()  # it was the one's before
        if has_progressed:
            progress.touch()
        child.has_ended(signal.SIGKILL)
        assert child.num_crashes == number
        assert (child.restart_at <= time.monotonic()) == (number == 1)


def test_another_child_that_has_answered_since_its_start_is_started_again_at_once():
    child = Child(ChildSpec("tritonserver", [], {}, Path()))
    for was_healthy, number in ((False, 1), (False, 2), (True, 1), (True, 1)):
        child.healthy_since = time.monotonic() if was_healthy else None
        child.has_ended(signal.SIGKILL)
        assert child.num_crashes == number


def test_a_host_that_was_lost_is_no_crash(child):
    child.has_ended(signal.SIGKILL)
    for _ in range(10):
        child.healthy_since = now = time.monotonic()
        assert child.has_ended(HostLost.exit_status << 8) is False
        assert (child.num_crashes, child.process, child.healthy_since) == (1, None, None)
        assert child.restart_at > now
    assert child.has_ended(signal.SIGKILL) is True
    assert child.num_crashes == 2


def test_a_child_that_could_not_be_started_is_tried_again_later(tmp_path):
    (tmp_path / "file").touch()
    child = Child(ChildSpec("engine", ["true"], {}, tmp_path / "file" / "engine.log"))
    child.start()
    assert child.process is None
    assert child.restart_at > time.monotonic()
    assert child.last_words.startswith("could not be started: ")


def test_the_first_restart_is_at_once_and_later_ones_wait_longer():
    assert [back_off(number) for number in (1, 2, 3, 4)] == [0, 1, 2, 4]
    assert back_off(50) == MAX_BACK_OFF_S


def test_an_exit_is_described_by_status_or_signal():
    assert describe_exit(7 << 8) == "ended with exit status 7"
    assert describe_exit(signal.SIGSEGV) == "was killed by SIGSEGV"


def test_what_is_stopped_again_and_again_is_not_stopped_for_long(monkeypatch):
    now, state = 0.0, "T"
    child = Child(ChildSpec("gateway-0", [], {}, Path()), Process("gateway-0", 1, 0))
    monkeypatch.setattr(child_module, "read_stat", lambda pid: Stat(state, 0, 0, 1))
    monkeypatch.setattr(child_module.time, "monotonic", lambda: now)
    for now, state in ((5, "T"), (19, "T"), (20, "S"), (21, "T"), (36, "T")):  # noqa: B007
        assert not child.is_stopped_for_long()
    now = 36.5
    assert child.is_stopped_for_long()
