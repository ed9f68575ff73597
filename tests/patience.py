"""Limits of waiting in tests. Only a test that fails waits that long."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

PATIENCE_S = 60


def wait_until(condition, why_not=lambda: "it has not come true", patience_s=PATIENCE_S):
    """Wait until `condition()` is true and return its value. It is called again after a tenth of the time waited."""
    began = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - began
        assert waited_s < patience_s, why_not()
        time.sleep(min(max(0.001, waited_s / 10), 0.02))
    return value


def in_background(function, *args) -> Future:
    """Call a function in a thread of its own. The future raises what the function has raised, in the test that waits
    for it, where a plain thread would only print it."""
    with_thread = ThreadPoolExecutor(1)
    future = with_thread.submit(function, *args)
    with_thread.shutdown(wait=False)
    return future
