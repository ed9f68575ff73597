"""The threads that help with an op: they come when they can, belong to who called it, and end with that thread."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from engine.ops import cpu
from tests.patience import wait_until

WIDTH = 512


@pytest.fixture(autouse=True)
def three_threads():
    before = cpu.num_threads()
    cpu.set_num_threads(3)
    yield
    cpu.set_num_threads(before)


def case(seed):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((160, WIDTH), np.float32), rng.standard_normal((WIDTH, WIDTH), np.float32)]


@pytest.mark.slow
def test_callers_at_the_same_time_have_threads_of_their_own():
    cases = [case(seed) for seed in range(4)]
    expected = [cpu.linear(*each) for each in cases]
    wrong = []

    def call(index):
        for _ in range(50):
            if not np.array_equal(cpu.linear(*cases[index]), expected[index]):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_threads_end_with_the_one_they_helped():
    there, seen = set(os.listdir("/proc/self/task")), set()

    def call():
        cpu.linear(*case(0))
        seen.update(set(os.listdir("/proc/self/task")) - there)

    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
    assert len(seen) == 3  # the caller and two that helped
    # Python says that a thread has ended when its own part has.
    wait_until(lambda: not seen & set(os.listdir("/proc/self/task")))


def test_the_number_of_threads_may_change_from_call_to_call():
    given = case(0)
    expected = cpu.linear(*given)
    for count in (1, 5, 2, 3):
        cpu.set_num_threads(count)
        assert np.array_equal(cpu.linear(*given), expected)


def test_threads_outnumbering_the_cores_get_on():
    given = case(0)
    expected = cpu.linear(*given)
    cpu.set_num_threads(16 * len(os.sched_getaffinity(0)))
    for _ in range(50):
        assert np.array_equal(cpu.linear(*given), expected)


FORKS = """
import os
import numpy as np
from engine.ops import cpu
cpu.set_num_threads(3)
x, weight = np.ones((40, 512), np.float32), np.ones((512, 512), np.float32)
expected = cpu.linear(x, weight)
child = os.fork()
is_right = all(np.array_equal(cpu.linear(x, weight), expected) for _ in range(50))
is_right &= child > 0 or len(os.listdir("/proc/self/task")) == 3
cpu.set_num_threads(2)  # the others end
is_right &= np.array_equal(cpu.linear(x, weight), expected)
if not child:
    os._exit(not is_right)
assert is_right and os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_a_child_of_fork_has_threads_of_its_own():
    """The threads of its parent do not exist there and are not waited for."""
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=60)
