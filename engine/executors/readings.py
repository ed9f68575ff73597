"""What a step tells of prompts: how likely their tokens were, and their hidden states. The same for every executor that
samples on the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.core.types import Batch, Logprobs, OfPrompt, Reading
from engine.ops.sampling_rows import SampledRows, SamplingRows

Sample = Callable[[np.ndarray, SamplingRows], SampledRows]
LOGITS_BYTES = 64 << 20  # of what is read in one step


def most_read(vocab_size: int) -> int:
    """Tokens, see Executor."""
    return max(1, LOGITS_BYTES // (4 * vocab_size))


def rows_read(batch: Batch, query_starts: np.ndarray) -> np.ndarray:
    """Which tokens of the step, i32: of each row the scored ones, then those pooled."""
    places = []
    for index, row in enumerate(batch.rows):
        if row.reading:
            start, end = query_starts[index], query_starts[index + 1]
            places.append(np.arange(start, start + len(row.reading.scored), dtype=np.int32))
            places.append(np.arange(end - row.reading.num_pooled, end, dtype=np.int32))
    return np.concatenate(places)


class Readings:
    """Of prompts in chunks, the sums so far."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[np.ndarray | float, int]] = {}  # slot -> f64 [H], of how many

    def begin(self, slot: int) -> None:
        self._sums.pop(slot, None)

    def read(self, batch: Batch, logits: np.ndarray, hidden: np.ndarray, sample: Sample) -> list[OfPrompt]:
        """By logits [.., V] and hidden states [.., H], of which the last rows are those of `rows_read`."""
        found, at = [], len(logits)
        for row in reversed(batch.rows):
            if reading := row.reading:
                pooled = hidden[at - reading.num_pooled : at]
                at -= reading.num_pooled
                scored = logits[at - len(reading.scored) : at]
                at -= len(reading.scored)
                scores = _scores(scored, reading, sample) if reading.scored else ()
                found.append(OfPrompt(scores, self._pooled(row.slot, pooled, reading)))
        return found[::-1]

    def _pooled(self, slot: int, hidden: np.ndarray, reading: Reading) -> bytes:
        """Empty before the end, and for what is no number."""
        if not reading.num_pooled:
            return b""
        total, count = self._sums.get(slot, (0.0, 0))
        total, count = self._sums[slot] = total + hidden.sum(axis=0, dtype=np.float64), count + len(hidden)
        mean = np.asarray(total / count, np.float32)
        return mean.tobytes() if reading.is_told and np.isfinite(mean).all() else b""


def _scores(logits: np.ndarray, reading: Reading, sample: Sample) -> list[Logprobs]:
    rows = SamplingRows.greedy(len(logits))
    rows.given = np.array(reading.scored, np.int32)
    rows.num_logprobs[:] = reading.num_logprobs
    sampled = sample(logits, rows)
    columns = zip(sampled.logprobs.tolist(), sampled.top_ids.tolist(), sampled.top_logprobs.tolist(), strict=True)
    return [
        Logprobs(chosen, tuple(pair for pair in zip(ids, tops, strict=True) if pair[0] >= 0))
        for chosen, ids, tops in columns
    ]
