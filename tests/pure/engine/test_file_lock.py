"""Tests of the lock between processes: one process holds it at a time, and a waiting one is notified."""

import errno
import fcntl
import logging
import threading

import pytest

from engine.file_lock import file_lock


def test_the_second_is_notified_of_waiting_and_comes_next(tmp_path):
    path, notified, order = tmp_path / "lock", threading.Event(), []

    def second():
        with file_lock(path, notified.set):
            order.append("second")

    with file_lock(path, pytest.fail):
        thread = threading.Thread(target=second)
        thread.start()
        assert notified.wait(60)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    with file_lock(path, pytest.fail):
        pass


def test_an_error_of_the_work_goes_through_and_frees_the_lock(tmp_path):
    with pytest.raises(BlockingIOError, match="of the work"), file_lock(tmp_path / "lock", pytest.fail):
        raise BlockingIOError("of the work")
    with file_lock(tmp_path / "lock", pytest.fail):
        pass


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), file_lock(tmp_path / "lock", pytest.fail):
        assert caplog.messages == [f"{tmp_path}/lock cannot be locked: No locks available"]
