"""Frequency of Python's garbage collection in processes that handle tokens."""

from __future__ import annotations

import gc

# New objects before the young are looked through; how often that, before the older and before all that live are.
OF_STEPS = 100_000, 50, 100
OF_REQUESTS = 10_000, 10, 10  # where what lives is requests, which may be large


def collect_garbage_seldom(thresholds: tuple[int, int, int] = OF_STEPS) -> None:
    """Collect garbage less often from now on. A step creates thousands of small objects without cycles; searching for
    cycles every 700 objects takes a tenth of the time outside the graph."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)
