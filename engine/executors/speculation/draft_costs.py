"""Costs of a draft model: measured times of its runs, and the time that reading prompts may take. It handles numbers
only."""

from __future__ import annotations

from collections import defaultdict

from engine.executors.speculation.estimates import StepTimes, rounded

MAX_DEBT = 64.0  # decode steps whose time may be spent on prompts that have not paid for themselves
REPAID_SHARE = 0.004  # of the time of all steps that prompts may cost without ever paying for themselves
MAX_SPIKE = 4.0  # of an unusually slow run, in its usual time, that counts
FIRST_GUESS = 0.25  # time of a draft token of a prompt, in decode runs of the draft model, before it is measured


class DraftCosts:
    """Times of the draft model, by the number of rows of a run and the tokens that it samples for each.

    Drafting for a request begins with its prompt, which the draft model has not computed. Its time is a debt that later
    drafts repay. While the debt is too large, no further prompts are read.
    """

    def __init__(self) -> None:
        self._runs: defaultdict[int, StepTimes] = defaultdict(_no_runs)
        self._prompt_token_s = 0.0
        self._debt_s = 0.0

    def run_s(self, num_rows: int, depth: int = 1) -> float:
        """Return the expected time of a run that computes `depth` tokens for each row. Between measured numbers of
        tokens it is interpolated, and a run of no token takes no time."""
        return self._runs[rounded(num_rows)].seconds(depth)

    def observe(self, num_rows: int, num_prompt_tokens: int, seconds: float, depth: int = 1) -> float:
        """Learn from a run. Return the share of its time that reading prompts has taken, which is added to the debt."""
        if not num_prompt_tokens:
            self._runs[rounded(num_rows)].observe(depth, seconds)
            return 0.0
        prompts_s = max(seconds - self.run_s(num_rows, depth), 0.0)
        if self._prompt_token_s:  # A process that takes the CPU for a while must not stop drafts for long.
            prompts_s = min(prompts_s, MAX_SPIKE * self._prompt_token_s * num_prompt_tokens)
        token_s = prompts_s / num_prompt_tokens
        self._prompt_token_s += (token_s - self._prompt_token_s) * (0.2 if self._prompt_token_s else 1.0)
        self._debt_s += prompts_s
        return prompts_s

    def owe(self, num_prompt_tokens: int) -> float:
        """Add to the debt the expected time of reading so many tokens of a prompt, and return it."""
        seconds = num_prompt_tokens * self._token_s
        self._debt_s += seconds
        return seconds

    def may_read(self, num_tokens: int, step_s: float) -> bool:
        """Return whether so many tokens of a prompt may be read now. `step_s` is the time of a step without drafts."""
        return self._debt_s + num_tokens * self._token_s <= MAX_DEBT * step_s

    def repay(self, gain_s: float, step_s: float) -> None:
        """Subtract from the debt the time that a step has saved by drafts, and a share of the time of the step."""
        self._debt_s = max(0.0, self._debt_s - max(gain_s, 0.0) - REPAID_SHARE * step_s)

    @property
    def _token_s(self) -> float:
        return self._prompt_token_s or FIRST_GUESS * self.run_s(1)


def _no_runs() -> StepTimes:
    times = StepTimes(1)
    times.observe(0, 0.0)
    return times
