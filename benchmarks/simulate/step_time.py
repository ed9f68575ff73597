"""Step-time model: the duration of a step as a linear function of its work, and an executor that only has durations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.core.cache_groups import FULL_ATTENTION
from engine.core.types import Batch, StepOutput

NUM_ROUNDS = 50  # of a fit

Work = tuple[int, int, int]  # prompt tokens, answer tokens and attended positions of a step


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step: a constant, and seconds for each prompt token, answer token and attended position."""

    step_s: float
    prompt_token_s: float
    answer_token_s: float
    position_s: float = 0.0

    def duration(self, work: Work) -> float:
        """Return the seconds of a step."""
        return self.step_s + self.prompt_token_s * work[0] + self.answer_token_s * work[1] + self.position_s * work[2]

    @classmethod
    def fitted(cls, steps: Sequence[tuple[Work, float]]) -> StepTimes:
        """Return the model with the least absolute error for measured steps, so that a few steps that waited for other
        work of the machine do not distort it, scaled so that all steps together take as long as measured. Coefficients
        are not negative: the most negative one is set to 0 and the others are fitted again."""
        inputs = np.array([[1, *work] for work, _ in steps], float)
        seconds = np.array([each for _, each in steps])
        names = list(range(4))
        while True:
            scale = np.abs(inputs[:, names]).max(axis=0).clip(1)
            found = _least_absolute(inputs[:, names] / scale, seconds)
            if found.min() >= 0:
                break
            names.pop(int(found.argmin()))
        found *= seconds.sum() / (inputs[:, names] / scale @ found).sum()
        coefficients = dict(zip(names, (found / scale).tolist(), strict=True))
        return cls(*(coefficients.get(name, 0.0) for name in range(4)))


def _least_absolute(inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Return the solution of least absolute error, by least squares with weights 1 / |error| of the solution before."""
    weights = np.ones(len(outputs))
    for _ in range(NUM_ROUNDS):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(inputs * root[:, None], outputs * root, rcond=None)[0]
        weights = 1 / np.abs(outputs - inputs @ found).clip(1e-5)
    return found


def work_of(batch: Batch) -> Work:
    """Return the work of a step. A row of one token that samples counts as an answer token."""
    prompt = answers = positions = 0
    for row in batch.rows:
        count = len(row.token_ids)
        if count == 1 and row.num_sampled == 1:
            answers += 1
        else:
            prompt += count
        positions += count * row.start + count * (count + 1) // 2
    return prompt, answers, positions


class ModelledExecutor:
    """Executor without a model. A step takes `duration` of its work on the clock `now`, which the owner may set. The
    token at index i of an answer is `token(i)`, whichever engine computes it."""

    block_bytes, runs_ahead, max_prompt_logits, takes_spans, max_drafts, thread = 1, False, 0, False, 0, None
    vision = expert_usage = draft_counts = None
    cache_groups = FULL_ATTENTION

    def __init__(self, times: StepTimes, token: Callable[[int], int], block_size: int = 64):
        self.now = 0.0
        self.block_size = block_size
        self._times, self._token = times, token
        self._prompt_lens: dict[int, int] = {}  # of slots
        self._output, self._ends_at = StepOutput([], []), 0.0

    def launch(self, batch: Batch) -> ModelledExecutor:
        for arrival in batch.arrivals:
            self._prompt_lens[arrival.slot] = arrival.prompt_len
        sampling = [row for row in batch.rows if row.num_sampled]
        indices = [row.start + len(row.token_ids) - self._prompt_lens[row.slot] for row in sampling]
        self._output = StepOutput([[self._token(index)] for index in indices], [None] * len(sampling))
        self._ends_at = self.now + self._times.duration(work_of(batch))
        return self

    def result(self) -> StepOutput:
        self.now = self._ends_at
        return self._output
