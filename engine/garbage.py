"""When Python looks for garbage, in the processes that tokens pass through."""

from __future__ import annotations

import gc

# New objects before the young are looked through; how often that, before the older and before all that live are.
OF_STEPS = 100_000, 50, 100
OF_REQUESTS = 10_000, 10, 10  # where what lives is requests, which may be large


def collect_garbage_seldom(thresholds: tuple[int, int, int] = OF_STEPS) -> None:
    """From now on: a step makes thousands of small objects that go by themselves, and looking through all that live for
    cycles every 700 of them is a tenth of the time of what is not the graph."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)
