"""Latency statistics as clients observe them: histograms in seconds, and the last ended requests without their text."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from typing import Any, NamedTuple

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
NUM_RECENT = 100  # ended requests that are remembered


class Histogram:
    """Histogram with the bucket bounds BUCKETS_S. `counts` is not cumulative; its last item counts values above the
    largest bound."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Add the value `seconds`, `times` times."""
        seconds = max(seconds, 0.0)  # the clock may be set back
        self.counts[bisect_left(BUCKETS_S, seconds)] += times
        self.sum_s += seconds * times


class RequestRecord(NamedTuple):
    """A choice that has finished, or a request that was refused or has failed."""

    reason: str  # finish reason, or kind of the error
    seconds: float  # since the arrival of the request
    first_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    key: str = ""  # the name of its owner


class LatencyStats:
    """Latency histograms, counts of ended requests by reason, and the last NUM_RECENT of them. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.time_to_first_token = Histogram()
        self.inter_token = Histogram()
        self.request = Histogram()
        self.num_ended: dict[str, int] = {}  # by finish reason or kind of error
        self._recent: deque[dict[str, Any]] = deque(maxlen=NUM_RECENT)

    def record_tokens(self, count: int, waited_s: float, is_first: bool) -> None:
        """Record `count` tokens that arrived together, `waited_s` seconds after the previous ones or, with `is_first`,
        after the request."""
        with self.lock:
            if is_first:
                self.time_to_first_token.observe(waited_s)
                count, waited_s = count - 1, 0.0
            if count:
                self.inter_token.observe(waited_s / count, count)

    def record_end(self, record: RequestRecord) -> None:
        """Record the end of a choice or request."""
        with self.lock:
            self.num_ended[record.reason] = self.num_ended.get(record.reason, 0) + 1
            self.request.observe(record.seconds)
            self._recent.appendleft({"ended_at": time.time(), **record._asdict()})

    def recent(self) -> list[dict[str, Any]]:
        """Return the most recently ended requests, the latest first."""
        with self.lock:
            return list(self._recent)
