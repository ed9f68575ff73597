"""Prompt outputs of a step: log-probabilities of prompt tokens and pooled hidden states. Shared by all executors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np

from engine.core.types import Batch, Logprobs, PromptOutputs, PromptOutputSpec
from engine.ops.sampling_rows import SampledRows, SamplingRows

Sample = Callable[[np.ndarray, SamplingRows], SampledRows]
LOGITS_BYTES = 64 << 20  # limit on the logits of the prompt tokens of one step


def max_prompt_logits(vocab_size: int) -> int:
    """Return how many prompt tokens of a step may have logits, see Executor."""
    return max(1, LOGITS_BYTES // (4 * vocab_size))


def prompt_output_rows(batch: Batch, query_starts: np.ndarray) -> np.ndarray:
    """Return the tokens of the step that have outputs, i32: the scored ones of each row, then the pooled ones."""
    scored, pooled = [], []
    for row, start, end in zip(batch.rows, query_starts, query_starts[1:], strict=False):
        if row.prompt_spec:
            scored.append(np.arange(start, start + len(row.prompt_spec.scored_ids), dtype=np.int32))
            pooled.append(np.arange(end - row.prompt_spec.num_pooled, end, dtype=np.int32))
    return np.concatenate(scored + pooled)


class Mean:
    """Mean of the hidden states of a prompt that is computed in chunks."""

    def __init__(self) -> None:
        self._total: np.ndarray | float = 0.0  # f64 [H]
        self._count = 0

    def add(self, hidden: np.ndarray) -> None:
        """Add hidden states [num_tokens, H]."""
        self._total, self._count = self._total + hidden.sum(axis=0, dtype=np.float64), self._count + len(hidden)

    def packed(self) -> bytes:
        """Return the mean as f32 [H], or no bytes if it is not a number."""
        mean = np.asarray(self._total / self._count, np.float32)
        return mean.tobytes() if np.isfinite(mean).all() else b""


Specs = Sequence[tuple[PromptOutputSpec, Mean]]  # one for each row with prompt outputs


class PooledStates:
    """Pooled hidden states of the chunks that each slot has computed so far."""

    def __init__(self) -> None:
        self._means: dict[int, Mean] = {}

    def begin(self, slot: int) -> None:
        """Forget the request that had `slot` before."""
        self._means.pop(slot, None)

    def specs(self, batch: Batch) -> Specs:
        """Return the outputs that `batch` has to produce. Must be called when the step is launched: when it has ended,
        a slot may belong to another request."""
        return [(row.prompt_spec, self._means.setdefault(row.slot, Mean())) for row in batch.rows if row.prompt_spec]

    def compute(self, batch: Batch, logits: np.ndarray, hidden: np.ndarray, sample: Sample) -> list[PromptOutputs]:
        """Return the prompt outputs of a step. The last rows of `logits` [.., V] and `hidden` [.., H] are those of
        `prompt_output_rows`."""
        specs = self.specs(batch)
        rows = scored_rows(specs)
        num_scored, num_pooled = len(rows.temperature), sum(spec.num_pooled for spec, _ in specs)
        first = len(logits) - num_scored - num_pooled
        sampled = sample(logits[first : first + num_scored], rows)
        return make_outputs(specs, sampled, hidden[len(hidden) - num_pooled :])


def scored_rows(specs: Specs) -> SamplingRows:
    """Return the sampler's rows for all scored tokens."""
    lengths = [len(spec.scored_ids) for spec, _ in specs]
    rows = SamplingRows.greedy(sum(lengths))
    rows.given = np.fromiter(chain.from_iterable(spec.scored_ids for spec, _ in specs), np.int32, sum(lengths))
    rows.num_logprobs[:] = np.repeat([spec.num_logprobs for spec, _ in specs], lengths)
    return rows


def make_outputs(specs: Specs, sampled: SampledRows, pooled: np.ndarray) -> list[PromptOutputs]:
    """Return the outputs of each row, given the sampler's results for `scored_rows` and the hidden states [.., H] of
    the pooled tokens."""
    columns = (sampled.logprobs.tolist(), sampled.top_ids.tolist(), sampled.top_logprobs.tolist())
    logprobs, outputs, start = zip(*columns, strict=True), [], 0
    for spec, mean in specs:
        of_tokens = [_logprobs(next(logprobs), spec.num_logprobs) for _ in spec.scored_ids]
        if spec.num_pooled:
            mean.add(pooled[start : start + spec.num_pooled])
            start += spec.num_pooled
        outputs.append(PromptOutputs(of_tokens, mean.packed() if spec.returns_pooled else b""))
    return outputs


def _logprobs(columns: tuple[float, Iterable[int], Iterable[float]], width: int) -> Logprobs:
    chosen, ids, tops = columns
    pairs = list(zip(ids, tops, strict=True))[:width]
    return Logprobs(chosen, tuple(pair for pair in pairs if pair[0] >= 0))
