"""What a step tells of prompts: how likely their tokens were, and their hidden states. The same for every executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np

from engine.core.types import Batch, Logprobs, OfPrompt, Reading
from engine.ops.sampling_rows import SampledRows, SamplingRows

Sample = Callable[[np.ndarray, SamplingRows], SampledRows]
LOGITS_BYTES = 64 << 20  # of what is read in one step


def most_read(vocab_size: int) -> int:
    """Tokens, see Executor."""
    return max(1, LOGITS_BYTES // (4 * vocab_size))


def rows_read(batch: Batch, query_starts: np.ndarray) -> np.ndarray:
    """Which tokens of the step, i32: the scored ones of each row, then the pooled ones of each."""
    scored, pooled = [], []
    for row, start, end in zip(batch.rows, query_starts, query_starts[1:], strict=False):
        if row.reading:
            scored.append(np.arange(start, start + len(row.reading.scored), dtype=np.int32))
            pooled.append(np.arange(end - row.reading.num_pooled, end, dtype=np.int32))
    return np.concatenate(scored + pooled)


class Mean:
    """Of the hidden states of a prompt, which come in chunks."""

    def __init__(self) -> None:
        self._total: np.ndarray | float = 0.0  # f64 [H]
        self._count = 0

    def add(self, hidden: np.ndarray) -> None:
        self._total, self._count = self._total + hidden.sum(axis=0, dtype=np.float64), self._count + len(hidden)

    def packed(self) -> bytes:
        """Empty for what is no number."""
        mean = np.asarray(self._total / self._count, np.float32)
        return mean.tobytes() if np.isfinite(mean).all() else b""


Asked = Sequence[tuple[Reading, Mean]]  # of the rows that are read


class Readings:
    """Of each slot, what its prompt has told so far."""

    def __init__(self) -> None:
        self._means: dict[int, Mean] = {}

    def begin(self, slot: int) -> None:
        self._means.pop(slot, None)

    def asked(self, batch: Batch) -> Asked:
        """To be asked when the step is launched: when it has ended, a slot may be somebody else's."""
        return [(row.reading, self._means.setdefault(row.slot, Mean())) for row in batch.rows if row.reading]

    def read(self, batch: Batch, logits: np.ndarray, hidden: np.ndarray, sample: Sample) -> list[OfPrompt]:
        """By logits [.., V] and hidden states [.., H], of which the last rows are those of `rows_read`."""
        asked = self.asked(batch)
        rows = rows_scored(asked)
        num_scored, num_pooled = len(rows.temperature), sum(reading.num_pooled for reading, _ in asked)
        first = len(logits) - num_scored - num_pooled
        sampled = sample(logits[first : first + num_scored], rows)
        return told(asked, sampled, hidden[len(hidden) - num_pooled :])


def rows_scored(asked: Asked) -> SamplingRows:
    """What the sampler is asked of all scored tokens."""
    lengths = [len(reading.scored) for reading, _ in asked]
    rows = SamplingRows.greedy(sum(lengths))
    rows.given = np.fromiter(chain.from_iterable(reading.scored for reading, _ in asked), np.int32, sum(lengths))
    rows.num_logprobs[:] = np.repeat([reading.num_logprobs for reading, _ in asked], lengths)
    return rows


def told(asked: Asked, sampled: SampledRows, pooled: np.ndarray) -> list[OfPrompt]:
    """By what the sampler has found of `rows_scored`, and the hidden states of what is pooled."""
    columns = (sampled.logprobs.tolist(), sampled.top_ids.tolist(), sampled.top_logprobs.tolist())
    scores, found, at = zip(*columns, strict=True), [], 0
    for reading, mean in asked:
        of_tokens = [_score(next(scores), reading.num_logprobs) for _ in reading.scored]
        if reading.num_pooled:
            mean.add(pooled[at : at + reading.num_pooled])
            at += reading.num_pooled
        found.append(OfPrompt(of_tokens, mean.packed() if reading.is_told else b""))
    return found


def _score(columns: tuple[float, Iterable[int], Iterable[float]], width: int) -> Logprobs:
    chosen, ids, tops = columns
    pairs = list(zip(ids, tops, strict=True))[:width]
    return Logprobs(chosen, tuple(pair for pair in pairs if pair[0] >= 0))
