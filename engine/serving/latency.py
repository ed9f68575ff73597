"""What clients wait for, in seconds: histograms, and the last answers without their words. Thread-safe."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from typing import Any, NamedTuple

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
NUM_LAST = 100  # ended answers that are remembered


class Histogram:
    """Counts by upper bound, as Prometheus has it; the last count is of everything beyond the largest bound."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        seconds = max(seconds, 0.0)  # the clock may be set back
        self.counts[bisect_left(BUCKETS_S, seconds)] += times
        self.sum_s += seconds * times


class Ended(NamedTuple):
    """An answer that has ended, or a request that was refused."""

    reason: str  # of its end, or kind of error
    seconds: float  # since its request
    first_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    key: str = ""  # the name of its owner


class Latency:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.time_to_first_token = Histogram()
        self.inter_token = Histogram()
        self.request = Histogram()
        self.num_ended: dict[str, int] = {}  # by finish reason or kind of error
        self._last: deque[dict[str, Any]] = deque(maxlen=NUM_LAST)

    def tokens(self, count: int, waited_s: float, is_first: bool) -> None:
        """`count` tokens arrived together, `waited_s` after the ones before (or after the request)."""
        with self.lock:
            if is_first:
                self.time_to_first_token.observe(waited_s)
                count, waited_s = count - 1, 0.0
            if count:
                self.inter_token.observe(waited_s / count, count)

    def ended(self, ended: Ended) -> None:
        with self.lock:
            self.num_ended[ended.reason] = self.num_ended.get(ended.reason, 0) + 1
            self.request.observe(ended.seconds)
            self._last.appendleft({"ended_at": time.time(), **ended._asdict()})

    def last(self) -> list[dict[str, Any]]:
        """The latest first."""
        with self.lock:
            return list(self._last)
