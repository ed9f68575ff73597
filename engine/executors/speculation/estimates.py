"""Estimates that the draft policy decides by: how often drafts are correct, and how long steps take."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

PRIOR, PRIOR_WEIGHT = 0.7, 2.0  # assumed share of correct first drafts, as if it had been seen so often
ANY_LEVEL, LEVEL_WEIGHT = -1, 4.0  # the share of all levels is assumed for each, as if it had been seen so often
DECAY = 0.998  # of the weight of earlier drafts, for each new one
AGING = 0.998  # of the weight of all drafts, for each step: positions that get no drafts are tried again
OPTIMISM = 0.0003  # share by which a time is assumed to fall with each step that does not measure it
# Assumed growth of a step's time when its tokens double, as long as it is not measured. On a device that runs ahead,
# all steps with drafts cost more than those of a pause, so nothing follows from few drafts for many: they are tried.
GROWTH, AHEAD_GROWTH = 0.25, 0.0
NUM_TRUSTED = 3  # measurements of a step time that are needed to rely on it
NUM_KNOWN_WELL = 16  # those from which on a single one counts less


class AcceptanceRates:
    """Running share of correct drafts, by level and position. A level stands for how sure a drafter is."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def record(self, level: int, num_correct: int, num_known: int) -> None:
        """Count drafts of one row: the first `num_correct` of them, and then a wrong one if more are known."""
        for position in range(min(num_correct + 1, num_known)):
            for counts in (self._counts[level, position], self._counts[ANY_LEVEL, position]):
                counts[0] = DECAY * counts[0] + (position < num_correct)
                counts[1] = DECAY * counts[1] + 1

    def age(self) -> None:
        """Give all counts less weight, because a step has been computed since."""
        for counts in self._counts.values():
            counts[0] *= AGING
            counts[1] *= AGING

    def expected(self, level: int, num_drafts: int) -> list[float]:
        """Return, for each of the drafts, the probability that it and those before it are correct."""
        probabilities, product, share = [], 1.0, PRIOR
        for position in range(num_drafts):
            correct, known = self._counts[ANY_LEVEL, position]
            share = (correct + share * PRIOR_WEIGHT) / (known + PRIOR_WEIGHT)  # as at the position before, unless seen
            correct, known = self._counts[level, position]
            product *= (correct + share * LEVEL_WEIGHT) / (known + LEVEL_WEIGHT)
            probabilities.append(product)
        return probabilities


class StepTimes:
    """Times of decode steps with one number of rows, as a function of the tokens beyond one for each row.

    The longer a number of tokens has not been measured, the less its time is expected to be. So it is tried again: the
    sooner, the less it was worse than others.
    """

    def __init__(self, num_rows: int, growth: float = GROWTH):
        self._num_rows, self._growth = num_rows, growth
        self.has_credit = False  # the policy has added it to its balance
        self._num_steps = self._num_drafted = 0  # steps, and those of them with more tokens than one for each row
        self._drafted_at = 0  # the last of the latter
        self._measured_at: dict[int, int] = {}  # by number of tokens: steps, or those with more tokens, at that time
        self._seconds: dict[int, float] = {}
        self._first: defaultdict[int, list[float]] = defaultdict(list)  # the first measurements, sorted
        self._num_seen: defaultdict[int, int] = defaultdict(int)
        self._known: list[int] = []  # sorted numbers of tokens whose times are relied on

    def observe(self, num_extra: int, seconds: float) -> None:
        num_extra = rounded(num_extra)
        self._num_steps += 1
        if num_extra:
            self._num_drafted, self._drafted_at = self._num_drafted + 1, self._num_steps
        self._measured_at[num_extra] = self._num_drafted if num_extra else self._num_steps
        seen = self._num_seen[num_extra] = self._num_seen[num_extra] + 1
        if seen == (NUM_TRUSTED if num_extra else 1):
            insort(self._known, num_extra)
        if seen <= NUM_TRUSTED:  # One of them may be slow or fast for many reasons.
            insort(self._first[num_extra], seconds)
            self._seconds[num_extra] = self._first[num_extra][(seen - 1) // 2]
            return
        # Single slow steps, in which another process has taken the CPU, do not move it far.
        ratio = min(max(seconds / self._seconds[num_extra], 0.7), 1.4)
        self._seconds[num_extra] *= 1 + (ratio - 1) * (0.1 if seen > NUM_KNOWN_WELL else 0.25)

    def age(self, num_extra: int) -> int:
        """Return the number of steps since this number of tokens was measured. Between drafts that are tried in vain,
        all numbers of drafts get older together, so that they are not tried one after another."""
        measured_at = self._measured_at.get(rounded(num_extra), 0)
        if not num_extra:
            return self._num_steps - measured_at
        return self._num_drafted - measured_at + self._num_steps - self._drafted_at

    def is_trusted(self, num_extra: int) -> bool:
        return self._num_seen[rounded(num_extra)] >= NUM_TRUSTED

    def measured(self, num_extra: int) -> float:
        """Return the time of a number of tokens when it was last measured, or 0."""
        return self._seconds.get(rounded(num_extra), 0.0)

    def seconds(self, num_extra: int) -> float:
        """Return the expected time of a step. Between measured numbers of tokens it is interpolated."""
        known = self._known
        if not known:
            return 0.0
        place = bisect_left(known, num_extra)
        if place < len(known) and known[place] == num_extra:
            return self._expected(num_extra)
        low = known[max(place - 1, 0)]
        low_s = self._expected(low)
        if place == len(known):
            slope = self._growth * low_s / self._num_rows
            if low and 0 in self._seconds:
                slope = max(0.0, low_s - self._expected(0)) / low
        else:
            high = known[place] if place else known[-1]
            slope = (self._expected(high) - low_s) / max(high - low, 1)
        return low_s + slope * (num_extra - low)

    def _expected(self, known: int) -> float:
        return self._seconds[known] / (1 + OPTIMISM * self.age(known))


def rounded(count: int) -> int:
    """Return a number of at most four significant bits, so that similar ones are measured together."""
    shift = max(0, count.bit_length() - 4)
    return count >> shift << shift
