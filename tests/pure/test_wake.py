"""What the supervisor sleeps on: nothing that happens is slept through, and no signal can lock it up."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from server_scripts.wake import Wake

ROOT = Path(__file__).resolve().parents[2]

STORM = """
import os, signal, subprocess, sys, time
from server_scripts.wake import Wake

wake = Wake()
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda *_: wake.set())
wake.on_signals()
command = f"import os\\nfor i in range(100_000): os.kill({os.getpid()}, (10, 12)[i % 2])"
storm = subprocess.Popen([sys.executable, "-S", "-c", command])
while storm.poll() is None:
    wake.wait(0.05)
"""


@pytest.fixture
def wake():
    made = Wake()
    yield made
    signal.set_wakeup_fd(-1)


def seconds_in(wait, *arguments) -> float:
    started = time.monotonic()
    wait(*arguments)
    return time.monotonic() - started


def test_a_wait_lasts_its_time_when_nothing_happens(wake):
    assert seconds_in(wake.wait, 0.05) >= 0.049


def test_what_was_set_before_a_wait_ends_that_wait_and_not_the_next(wake):
    wake.set()
    wake.set()
    assert seconds_in(wake.wait, 60) < 30
    assert seconds_in(wake.wait, 0.05) >= 0.049


def test_another_thread_ends_a_wait(wake):
    threading.Timer(0.05, wake.set).start()
    assert seconds_in(wake.wait, 60) < 30


def test_a_signal_that_came_before_a_wait_ends_it(wake):
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        wake.on_signals()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seconds_in(wake.wait, 60) < 30
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_more_news_than_the_pipe_holds_block_nobody(wake):
    for _ in range(1 << 17):
        wake.set()
    assert seconds_in(wake.wait, 60) < 30


def test_a_storm_of_signals_locks_nothing_up():
    """The handlers set the wake themselves, which is where a lock would be taken twice."""
    subprocess.run([sys.executable, "-c", STORM], timeout=60, check=True, cwd=ROOT)
