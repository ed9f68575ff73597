"""Draft policy: decides how many draft tokens a step verifies, from measured step times and from how often drafts were
correct. It handles numbers only; drafts never change an answer, so the policy cannot either."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from engine.core.types import Row, StepOutput
from engine.executors.speculation.estimates import (
    AHEAD_GROWTH,
    ANY_LEVEL,
    GROWTH,
    NUM_TRUSTED,
    AcceptanceRates,
    StepTimes,
    rounded,
)

MIN_GAIN = 1.03  # expected ratio of token rates from which drafts are verified
LOSS_SHARE = 0.005  # of the time of all steps that drafts may cost
MAX_BALANCE = 20.0  # steps without drafts whose time earlier gains may be spent on
MAX_SPIKE = 1.5  # of an unusually slow step, in its usual time, that counts
CREDIT = 9.0  # of these steps, at the start, for each number of rows
LEAST_PROBABILITY = 0.05  # of drafts that are considered
# Time that drafting adds to a step even if nothing is drafted, and the share of the time of all steps that it may take.
BOOKKEEPING_S, ROW_BOOKKEEPING_S, BOOKKEEPING_SHARE = 60e-6, 10e-6, 0.003
NUM_PROBES = 8  # steps without chosen drafts after which the policy pauses
# On a device that runs ahead, only the steps of a pause have the time of steps without drafts.
NUM_UNSETTLED, NUM_MEASURED = 2, NUM_TRUSTED + 1  # steps at the beginning of a pause, and those that are measured then
# Steps of a pause if drafts do not seem to pay, and of its continuation as long as they do not.
PAUSE, MORE_PAUSE = 48, 16
MAX_READING = 4.0  # of a step in which states of the steps of a pause are read, in its usual time, that counts
Offer = tuple[int, int]  # level and number of the drafts of a row
Group = tuple[float, int, list[int]]  # drafts at one position of equal offers: probability, position, indices of offers
END: Group = (0.0, 0, [])  # behind the last group


class DraftPolicy:
    """Policy of one engine. It chooses the drafts with the best expected rate of tokens, none if that is not better.

    It keeps a balance of the time that drafts have saved by estimate and of the time that they may cost, a small share
    of all steps. While the balance is used up, nothing is drafted.

    On a device that `runs_ahead`, steps are launched ahead while the policy pauses drafting, and are faster than others
    without drafts.
    """

    def __init__(self, runs_ahead: bool = False):
        self._runs_ahead = runs_ahead
        self._num_paused = 0
        self.acceptance = AcceptanceRates()
        self._times: dict[int, StepTimes] = {}  # by the number of rows
        self._prompt_token_s = 0.0  # of steps that also compute prompts
        self._balance_s = 0.0
        self._num_left_to_pause = self._num_quiet = 0  # `_num_quiet`: steps without chosen drafts since the last pause
        self._offers: Sequence[Offer] = ()  # the last ones
        self._least: dict[int, float] = {}  # by the number of rows: probability from which on drafts are verified

    @property
    def may_draft(self) -> bool:
        """Return whether drafts could be chosen."""
        return self._balance_s > 0

    @property
    def is_paused(self) -> bool:
        """Return whether the next step should be computed without any bookkeeping for drafts."""
        return self._num_left_to_pause > 0

    def begin_pause(self) -> None:
        """Begin a pause with the next step, on a device that runs ahead."""
        self._num_paused = 0

    def observe_pause(
        self, seconds: float, rows: Sequence[Row] = (), *, is_usual: bool = True, num_unable: int = 0
    ) -> None:
        """Learn the time of a step of a pause, which counts on a device that runs ahead. There the pause goes on until
        drafts seem to pay, although `num_unable` rows can have none. A step is not usual if hidden states were read in
        its time, which is a cost of drafts."""
        self.acceptance.age()
        self._num_paused += 1
        self._balance_s += LOSS_SHARE * seconds
        if not self._runs_ahead:
            self._num_left_to_pause = max(self._num_left_to_pause - 1, 0)
            return
        num_rows, _ = _tokens_of(rows)
        times = self._times_of(num_rows)
        if not is_usual:
            self._balance_s += times.measured(0) - min(seconds, MAX_READING * times.measured(0))
        elif num_rows == len(rows):
            if self._num_paused == 1:  # It has waited for the step before.
                self._balance_s -= min(max(seconds - times.measured(0), 0.0), times.measured(0))
            elif self._num_paused > NUM_UNSETTLED:
                self._observe_base(times, seconds)
        elif self._num_paused > NUM_UNSETTLED:
            self.observe_beside_prompts(sum(len(row.token_ids) for row in rows), seconds)
        if self._balance_s > 0:
            self._num_left_to_pause = max(self._num_left_to_pause - 1, 0)
            if not self._num_left_to_pause and not self._may_pay(num_rows, num_rows - num_unable):
                self._num_left_to_pause = MORE_PAUSE

    def _may_pay(self, num_rows: int, num_able: int) -> bool:
        """Return whether drafts seem to pay if `num_able` of the rows get some."""
        if not self._times_of(num_rows).is_trusted(0):
            return False
        num_drafts = max((num_drafts for _, num_drafts in self._offers), default=1)
        self._plan(num_rows, 0, [(ANY_LEVEL, num_drafts)] * num_able)
        return self._least[rounded(num_rows)] <= 1

    def choose(self, num_rows: int, num_extra: int, offers: Sequence[Offer]) -> list[int]:
        """Return how many drafts of each offer a decode step verifies: those of the probability that was planned after
        the last step, while the device was busy.

        `num_rows` are all rows of the step and `num_extra` its other tokens beyond one for each row.
        """
        if not offers or not self._times_of(num_rows).is_trusted(num_extra) or self._balance_s <= 0:
            return [0] * len(offers)
        self._offers = offers
        if rounded(num_rows) not in self._least:
            self._plan(num_rows, num_extra, offers)
        least = self._least[rounded(num_rows)]
        counts = {
            offer: sum(probability >= least for probability in self.acceptance.expected(*offer))
            for offer in set(offers)
        }
        return [counts[offer] for offer in offers]

    def _plan(self, num_rows: int, num_extra: int, offers: Sequence[Offer]) -> None:
        """Decide which drafts are verified in steps with so many rows, if such `offers` are made."""
        sizes = num_rows, num_extra
        self._least[rounded(num_rows)] = _least_probability(self._sorted(offers), sizes, self._times_of(num_rows))

    def choose_beside_prompts(self, num_rows: int, offers: Sequence[Offer]) -> list[int]:
        """Return how many drafts of each offer are verified in a step that also computes prompts: those that are
        expected to save more time in later steps than they cost in this one. `num_rows` are those that decode."""
        counts, times = [0] * len(offers), self._times_of(num_rows)
        if self._prompt_token_s and self._balance_s > 0 and times.is_trusted(0):
            least = MIN_GAIN * self._prompt_token_s * num_rows / times.measured(0)
            for probability, _, indices in self._sorted(offers):
                for index in indices if probability > least else ():
                    counts[index] += 1
        return counts

    def choose_for(self, rows: Sequence[Row], offers: Sequence[Offer]) -> list[int]:
        """Return how many drafts of each offer the step of these rows verifies."""
        num_decoding, num_extra = _tokens_of(rows)
        if num_decoding < len(rows):
            return self.choose_beside_prompts(num_decoding, offers)
        return self.choose(num_decoding, num_extra, offers)

    def step_s(self, num_rows: int) -> float:
        """Return the expected time of a decode step without drafts, of the measured number of rows that is closest to
        this one; 0 if none is measured."""
        measured = [each for each, times in self._times.items() if times.measured(0)]
        return self._times[min(measured, key=lambda each: abs(each - num_rows))].measured(0) if measured else 0.0

    def learn(
        self, rows: Sequence[Row], output: StepOutput, times_s: tuple[float, float], *, is_usual: bool = True
    ) -> float:
        """Learn from a step. `times_s` are its time and that of drafting before it, from which nothing follows for
        other steps unless they are usual. Return the time that its drafts have saved by estimate, which may be
        negative."""
        seconds, _ = times_s
        num_decoding, num_extra = _tokens_of(rows)
        if num_decoding < len(rows):
            self.observe_beside_prompts(sum(len(row.token_ids) for row in rows), seconds)
            return 0.0
        return self.observe(num_decoding, num_extra, sum(map(len, output.token_ids)), times_s, is_usual=is_usual)

    def observe(
        self,
        num_rows: int,
        num_extra: int,
        num_sampled: int,
        times_s: tuple[float, float],
        *,
        is_usual: bool = True,
    ) -> float:
        """Learn from a decode step: its rows, its other tokens, how many tokens it has sampled, and the times of the
        step and of drafting. Return the time that drafts have saved by estimate."""
        seconds, draft_s = times_s
        self.acceptance.age()
        times = self._times_of(num_rows)
        if self._runs_ahead and not num_extra:
            return self._observe_probe(times, seconds + draft_s)
        if not num_extra and is_usual:
            self._observe_base(times, seconds)
        elif is_usual:
            times.observe(num_extra, seconds + draft_s)
        if self._offers and times.is_trusted(0):
            self._plan(num_rows, 0, self._offers)
        base_s = times.measured(0)
        # A process that takes the CPU for a while must not decide whether drafts pay.
        saved_s = -min(draft_s, 2 * base_s)
        if num_extra and times.is_trusted(0):
            cost_s = seconds + draft_s
            if is_usual:
                cost_s = min(cost_s, MAX_SPIKE * times.measured(num_extra))
            saved_s = num_sampled / num_rows * base_s - cost_s
        limit_s = MAX_BALANCE * base_s
        self._balance_s = min(max(self._balance_s + LOSS_SHARE * seconds + saved_s, -2 * limit_s), limit_s)
        self._num_quiet = 0 if num_extra else self._num_quiet + 1
        if self._num_quiet >= NUM_PROBES and times.is_trusted(0):
            self._num_quiet = 0
            share = (BOOKKEEPING_S + ROW_BOOKKEEPING_S * num_rows) / max(base_s, 1e-9)
            num_steps = int(NUM_PROBES * share / BOOKKEEPING_SHARE)
            self._num_left_to_pause = num_steps if num_steps > NUM_PROBES else 0
        return saved_s

    def _observe_base(self, times: StepTimes, seconds: float) -> None:
        times.observe(0, seconds)
        if not times.has_credit and times.is_trusted(0):
            times.has_credit = True
            self._balance_s += CREDIT * times.measured(0)

    def _observe_probe(self, times: StepTimes, seconds: float) -> float:
        """Learn from a step that had no drafts and was not launched ahead, on a device that runs ahead: it has cost
        time, so the policy pauses. Return the time that it has saved, which is negative."""
        base_s = times.measured(0)
        saved_s = max(min(base_s - seconds, 0.0), -base_s)
        self._balance_s = max(self._balance_s + LOSS_SHARE * seconds + saved_s, -2 * MAX_BALANCE * base_s)
        if not self._num_left_to_pause:
            is_measured = times.is_trusted(0) and times.age(0) < PAUSE
            self._num_left_to_pause = PAUSE if is_measured else NUM_UNSETTLED + NUM_MEASURED
        return saved_s

    def observe_beside_prompts(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that has also computed prompts."""
        token_s = seconds / num_tokens
        self._prompt_token_s += (token_s - self._prompt_token_s) * (0.1 if self._prompt_token_s else 1)

    def _times_of(self, num_rows: int) -> StepTimes:
        growth = AHEAD_GROWTH if self._runs_ahead else GROWTH
        return self._times.setdefault(rounded(num_rows), StepTimes(num_rows, growth))

    def _sorted(self, offers: Sequence[Offer]) -> list[Group]:
        """Return all drafts in groups, the most probable first."""
        indices_of: defaultdict[Offer, list[int]] = defaultdict(list)
        for index, offer in enumerate(offers):
            indices_of[offer].append(index)
        groups = [
            (probability, position, indices)
            for offer, indices in indices_of.items()
            for position, probability in enumerate(self.acceptance.expected(*offer))
            if probability > LEAST_PROBABILITY
        ]
        return sorted(groups, key=lambda each: (-each[0], each[1]))


def _tokens_of(rows: Sequence[Row]) -> tuple[int, int]:
    """Return how many rows decode, and how many tokens these have beyond one each."""
    decoding = [row for row in rows if len(row.token_ids) == row.num_sampled]
    return len(decoding), sum(row.num_sampled - 1 for row in decoding)


def _least_probability(groups: Sequence[Group], sizes: tuple[int, int], times: StepTimes) -> float:
    """Return the probability from which on drafts are verified for the highest expected rate of tokens, infinity if
    that is not MIN_GAIN times the one without drafts. It lies between those of the last draft that is verified and of
    the next one, because probabilities differ a little from step to step. `sizes` are the rows of the step and its
    other tokens beyond one for each row."""
    num_rows, num_extra = sizes
    best_rate, least = MIN_GAIN * num_rows / times.seconds(num_extra), float("inf")
    expected = float(num_rows)
    for (probability, _, indices), (following, _, _) in pairwise([*groups, END]):
        num_extra, expected = num_extra + len(indices), expected + probability * len(indices)
        rate = expected / times.seconds(num_extra)
        if rate > best_rate:
            best_rate, least = rate, (probability + following) / 2
    return least
