"""Counts of draft tokens by their position, which the executor keeps and the statistics of the engine contain."""

from __future__ import annotations

from collections import Counter

DRAFTED, ACCEPTED = "num_drafted_tokens", "num_accepted_tokens"


class DraftCounts:
    """Numbers of draft tokens that were verified, and of those that were accepted, at each position behind the known
    tokens. A thread may read them while another one counts."""

    def __init__(self, method: str):
        self._method = method
        self._drafted: Counter[int] = Counter()  # by position, from 1
        self._accepted: Counter[int] = Counter()

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of one row, of which the first `num_accepted` were accepted."""
        for position in range(1, num_drafts + 1):
            self._drafted[position] += 1
            self._accepted[position] += position <= num_accepted

    def stats(self) -> dict[str, float]:
        """Return the counts by names that `labels_of` can read."""
        counts = {DRAFTED: self._drafted, ACCEPTED: self._accepted}
        return {
            f"{name}/{self._method}/{position}": count
            for name, by_position in counts.items()
            for position, count in sorted(by_position.copy().items())
        }


def labels_of(name: str) -> tuple[tuple[str, str], ...]:
    """Return the labels of a statistic of `DraftCounts.stats`."""
    _, method, position = name.split("/")
    return (("method", method), ("position", position))
