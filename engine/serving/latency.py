"""Histograms of what clients wait for, in seconds. Thread-safe."""

from __future__ import annotations

import threading
from bisect import bisect_left

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Counts by upper bound, as Prometheus has it; the last count is of everything beyond the largest bound."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        seconds = max(seconds, 0.0)  # the clock may be set back
        self.counts[bisect_left(BUCKETS_S, seconds)] += times
        self.sum_s += seconds * times


class Latency:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.time_to_first_token = Histogram()
        self.inter_token = Histogram()
        self.request = Histogram()
        self.num_ended: dict[str, int] = {}  # by finish reason or kind of error

    def tokens(self, count: int, waited_s: float, is_first: bool) -> None:
        """`count` tokens arrived together, `waited_s` after the ones before (or after the request)."""
        with self.lock:
            if is_first:
                self.time_to_first_token.observe(waited_s)
                count, waited_s = count - 1, 0.0
            if count:
                self.inter_token.observe(waited_s / count, count)

    def ended(self, reason: str, seconds: float) -> None:
        with self.lock:
            self.num_ended[reason] = self.num_ended.get(reason, 0) + 1
            self.request.observe(seconds)
