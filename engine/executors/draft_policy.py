"""Draft policy: decides how many draft tokens a step verifies, from measured step times and from how often drafts were
right. It handles numbers only; drafts never change an answer, so the policy cannot either."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Sequence

from engine.core.types import Row, StepOutput

PRIOR, PRIOR_WEIGHT = 0.7, 2.0  # assumed share of right first drafts, as if it had been seen so often
ANY_LEVEL, LEVEL_WEIGHT = -1, 4.0  # the share of all levels is assumed for each, as if it had been seen so often
DECAY = 0.998  # of the weight of earlier drafts, for each new one
AGING = 0.998  # of the weight of all drafts, for each step: positions that get no drafts are tried again
# Assumed growth of a step's time when its tokens double, as long as it is not measured. On a device that runs ahead,
# all steps with drafts cost more than those of a rest, so nothing follows from few drafts for many: they are tried.
GROWTH, AHEAD_GROWTH = 0.25, 0.0
NUM_TRUSTED = 3  # measurements of a step time that are needed to rely on it
NUM_KNOWN_WELL = 16  # those from which on a difference may be one of all numbers of tokens
MIN_GAIN = 1.03  # expected ratio of token rates from which drafts are verified
RICH_MIN_GAIN = 1.0  # the same as long as the balance is high, on a device that runs ahead
LOSS_SHARE = 0.006  # of the time of all steps that drafts may cost
MAX_BALANCE = 20.0  # steps without drafts whose time earlier gains may be spent on
MAX_SPIKE = 1.5  # of an unusually slow step, in its usual time, that counts
CREDIT = 9.0  # of these steps, at the start, for each number of rows
LEAST_PROBABILITY = 0.05  # of drafts that are considered
MAX_IDLE = 64  # steps after which drafts are tried again, although they do not seem to pay
# Time that drafting adds to a step even if nothing is drafted, and the share of the time of all steps that it may take.
BOOKKEEPING_S, ROW_BOOKKEEPING_S, BOOKKEEPING_SHARE = 60e-6, 10e-6, 0.003
NUM_PROBES = 8  # steps without chosen drafts after which the policy rests
BASE_INTERVAL = 128  # steps with drafts after which one without them is measured
# On a device that runs ahead, only the steps of a rest have the time of steps without drafts.
NUM_UNSETTLED, NUM_MEASURED = 2, NUM_TRUSTED + 1  # steps at the beginning of a rest, and those that are measured then
REST = 96  # steps of a rest if drafts do not seem to pay
AHEAD_BASE_INTERVAL, AHEAD_MAX_IDLE = 512, 8
# Steps without drafts are measured more often where the ratio of token rates is below CLOSE, and where it is below SURE
# as long as there are few measurements: the interval is then a multiple of their number.
CLOSE, CLOSE_BASE_INTERVAL, SURE, INTERVAL_OF_EACH = 1.08, 96, 1.4, 8
# Ratio of token rates below which rests are so much longer on a device that runs ahead, and looking for a gain may cost
# so much less.
FAR, FAR_FACTOR = 0.92, 4
Offer = tuple[int, int]  # level and number of the drafts of a row
Group = tuple[float, int, list[int]]  # drafts at one position of equal offers: probability, position, indices of offers
no_time: Callable[[int], float] = lambda depth: 0.0  # noqa: E731


class Acceptance:
    """Running share of right drafts, by level and position. A level stands for how sure a drafter is."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def record(self, level: int, num_right: int, num_judged: int) -> None:
        """Count drafts of one row: the first `num_right` of them, and then a wrong one if more have been judged."""
        for position in range(min(num_right + 1, num_judged)):
            for counts in (self._counts[level, position], self._counts[ANY_LEVEL, position]):
                counts[0] = DECAY * counts[0] + (position < num_right)
                counts[1] = DECAY * counts[1] + 1

    def age(self) -> None:
        """Give all counts less weight, because a step has been computed since."""
        for counts in self._counts.values():
            counts[0] *= AGING
            counts[1] *= AGING

    def expected(self, level: int, num_drafts: int) -> list[float]:
        """Return, for each of the drafts, the probability that it and those before it are right."""
        probabilities, product, share = [], 1.0, PRIOR
        for position in range(num_drafts):
            right, judged = self._counts[ANY_LEVEL, position]
            share = (right + share * PRIOR_WEIGHT) / (judged + PRIOR_WEIGHT)  # as at the position before, unless seen
            right, judged = self._counts[level, position]
            product *= (right + share * LEVEL_WEIGHT) / (judged + LEVEL_WEIGHT)
            probabilities.append(product)
        return probabilities


class StepTimes:
    """Times of decode steps with one number of rows, as a function of the tokens beyond one for each row."""

    def __init__(self, num_rows: int, growth: float = GROWTH):
        self._num_rows, self._growth = num_rows, growth
        self.has_credit = False  # the policy has added it to its balance
        self._scale = 1.0  # follows slow changes that concern all numbers of tokens, such as longer contexts
        self._seconds: dict[int, float] = {}  # in units of the scale
        self._first: defaultdict[int, list[float]] = defaultdict(list)  # the first measurements, sorted
        self._num_seen: defaultdict[int, int] = defaultdict(int)
        self._known: list[int] = []  # sorted numbers of tokens whose times are relied on

    def observe(self, num_extra: int, seconds: float) -> None:
        num_extra = rounded(num_extra)
        seen = self._num_seen[num_extra] = self._num_seen[num_extra] + 1
        if seen == (NUM_TRUSTED if num_extra else 1):
            insort(self._known, num_extra)
        if seen <= NUM_TRUSTED:  # One of them may be slow or fast for many reasons.
            insort(self._first[num_extra], seconds / self._scale)
            self._seconds[num_extra] = self._first[num_extra][(seen - 1) // 2]
            return
        # Single slow steps, in which another process has taken the CPU, do not move it far.
        ratio = min(max(seconds / (self._scale * self._seconds[num_extra]), 0.7), 1.4)
        is_known_well = seen > NUM_KNOWN_WELL
        self._seconds[num_extra] *= 1 + (ratio - 1) * (0.1 if is_known_well else 0.25)
        self._scale *= 1 + (ratio - 1) * (0.15 if is_known_well else 0.0)

    def num_seen(self, num_extra: int) -> int:
        return self._num_seen[rounded(num_extra)]

    def is_trusted(self, num_extra: int) -> bool:
        return self.num_seen(num_extra) >= NUM_TRUSTED

    def seconds(self, num_extra: int) -> float:
        """Return the expected time of a step. Between measured numbers of tokens it is interpolated."""
        known = self._known
        if not known:
            return 0.0
        place = bisect_left(known, num_extra)
        if place < len(known) and known[place] == num_extra:
            return self._scale * self._seconds[num_extra]
        low = known[max(place - 1, 0)]
        if place == len(known):
            slope = self._growth * self._seconds[low] / self._num_rows
            if low and 0 in self._seconds:
                slope = max(0.0, self._seconds[low] - self._seconds[0]) / low
        else:
            high = known[place] if place else known[-1]
            slope = (self._seconds[high] - self._seconds[low]) / max(high - low, 1)
        return self._scale * (self._seconds[low] + slope * (num_extra - low))

    def known_between(self, low: int, high: int) -> list[int]:
        """Return the numbers of tokens in this range, without its ends, whose times are relied on. Between two of them
        the time is linear."""
        return self._known[bisect_right(self._known, low) : bisect_left(self._known, high)]


def rounded(number: int) -> int:
    """Return a number of at most four significant bits, so that similar ones are measured together."""
    shift = max(0, number.bit_length() - 4)
    return number >> shift << shift


class DraftPolicy:
    """Policy of one engine. It chooses the drafts with the best expected rate of tokens, none if that is not better.

    It keeps a balance of the time that drafts have saved by estimate and of the time that they may cost, a small share
    of all steps. While the balance is used up, nothing is drafted.
    """

    def __init__(self) -> None:
        self.is_ahead = False  # steps of a rest are launched ahead, and are faster than others without drafts
        self._num_rested = self._num_rows_at_rest = 0
        self.acceptance = Acceptance()
        self._times: dict[int, StepTimes] = {}  # by the number of rows
        self._draft_times: defaultdict[int, StepTimes] = defaultdict(lambda: StepTimes(1))
        self._prompt_token_s = 0.0  # of steps that also compute prompts
        self._balance_s = 0.0
        self._num_left_to_rest = self._num_quiet = 0  # `_num_quiet`: steps without chosen drafts since the last rest
        self._num_idle = self._num_busy = 0  # steps without chosen drafts, and with them, since the last others
        self._ratio = 1.0  # expected rate of tokens with the best number of drafts, divided by that without drafts

    @property
    def wants_offers(self) -> bool:
        """Return whether drafting is worth its own time. If drafts have not paid for a while, it seldom is."""
        is_tried = self.is_ahead or self._num_idle < MAX_IDLE // 4 or self._num_idle % 8 == 0
        return self._balance_s > 0 and is_tried

    @property
    def rests(self) -> bool:
        """Return whether the next step should be computed without any bookkeeping for drafts."""
        return self._num_left_to_rest > 0

    @property
    def may_pay(self) -> bool:
        """Return whether drafts were expected to save time when a step last chose them, or none has chosen yet."""
        return self._ratio >= 1.0

    def begin_rest(self) -> None:
        """Note that the next step is the first one of a rest, on a device that runs ahead."""
        self._num_rested = 0

    def rest(self, seconds: float, rows: Sequence[Row] = ()) -> None:
        """Note a step that was computed while the policy rests, and its time, which counts on a device that runs
        ahead."""
        self.acceptance.age()
        self._num_rested += 1
        self._balance_s += LOSS_SHARE * seconds / self._far_factor
        if self._balance_s > 0 or not self.is_ahead:
            self._num_left_to_rest = max(self._num_left_to_rest - 1, 0)
        num_rows, _ = _tokens_of(rows)
        if self.is_ahead and self._num_rested == 1 and num_rows == len(rows):  # It has waited for the step before.
            base_s = self._times_of(num_rows).seconds(0)
            self._balance_s -= min(max(seconds - base_s, 0.0), base_s)
        if not self.is_ahead or self._num_rested <= NUM_UNSETTLED:
            return
        if num_rows < len(rows):
            self.observe_beside_prompts(sum(len(row.token_ids) for row in rows), seconds)
            return
        self._observe_base(self._times_of(num_rows), seconds)
        if num_rows.bit_length() != self._num_rows_at_rest.bit_length() and self._balance_s > 0:
            self._num_left_to_rest = 0

    def choose(
        self, num_rows: int, num_extra: int, offers: Sequence[Offer], draft_s: Callable[[int], float] = no_time
    ) -> list[int]:
        """Return how many drafts of each offer a decode step verifies.

        `num_rows` are all rows of the step and `num_extra` its other tokens beyond one for each row. `draft_s` is the
        time that drafting takes if the longest drafts have that length.
        """
        times = self._times_of(num_rows)
        counts, base_s = [0] * len(offers), times.seconds(num_extra)
        if not offers or not times.is_trusted(num_extra) or self._balance_s <= 0 or self._is_base_due(times):
            return counts
        groups = self._sorted(offers)
        num_probable = sum(len(indices) for _, _, indices in groups)
        if not num_probable:
            return counts
        rate, best = _best_number(groups, (num_rows, num_extra), times, draft_s)
        self._ratio = rate * base_s / num_rows
        min_gain = RICH_MIN_GAIN if self._is_rich(base_s) else MIN_GAIN
        num_chosen = best if self._ratio > min_gain else 0
        max_idle = AHEAD_MAX_IDLE // self._far_factor if self.is_ahead else MAX_IDLE
        if not num_chosen and self._num_idle >= max_idle:  # The times or the acceptance may have changed.
            num_tried = num_probable if self.is_ahead else 1
            num_chosen = num_tried * (self._balance_s > times.seconds(num_extra + num_tried) - base_s)
        for _, _, indices in groups:
            for index in indices[:num_chosen]:
                counts[index] += 1
            num_chosen = max(num_chosen - len(indices), 0)
        return counts

    def choose_beside_prompts(self, num_rows: int, offers: Sequence[Offer]) -> list[int]:
        """Return how many drafts of each offer are verified in a step that also computes prompts: those that are
        expected to save more time in later steps than they cost in this one. `num_rows` are those that decode."""
        counts, times = [0] * len(offers), self._times_of(num_rows)
        if self._prompt_token_s and self._balance_s > 0 and times.is_trusted(0):
            least = MIN_GAIN * self._prompt_token_s * num_rows / times.seconds(0)
            for probability, _, indices in self._sorted(offers):
                for index in indices if probability > least else ():
                    counts[index] += 1
        return counts

    def choose_for(
        self, rows: Sequence[Row], offers: Sequence[Offer], draft_s: Callable[[int], float] = no_time
    ) -> list[int]:
        """Return how many drafts of each offer the step of these rows verifies. `draft_s`: see `choose`."""
        num_decoding, num_extra = _tokens_of(rows)
        if num_decoding < len(rows):
            return self.choose_beside_prompts(num_decoding, offers)
        return self.choose(num_decoding, num_extra, offers, draft_s)

    def step_s(self, num_rows: int) -> float:
        """Return the expected time of a decode step without drafts, of the measured number of rows that is closest to
        this one; 0 if none is measured."""
        measured = [each for each, times in self._times.items() if times.seconds(0)]
        return self._times[min(measured, key=lambda each: abs(each - num_rows))].seconds(0) if measured else 0.0

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
        if self.is_ahead and not num_extra:
            return self._observe_probe(num_rows, seconds + draft_s)
        if is_usual:
            self._observe_base(times, seconds, num_extra)
        base_s = times.seconds(0)
        self._num_idle, self._num_busy = (0, self._num_busy + 1) if num_extra else (self._num_idle + 1, 0)
        # A process that takes the CPU for a while must not decide whether drafts pay.
        saved_s = -min(draft_s, 2 * base_s)
        if num_extra and times.is_trusted(0):
            cost_s = seconds + draft_s
            if is_usual:
                drafting = self._draft_times[rounded(num_rows)]
                drafting.observe(num_extra, max(draft_s, 1e-7))
                cost_s = min(seconds, MAX_SPIKE * times.seconds(num_extra))
                cost_s += min(draft_s, MAX_SPIKE * drafting.seconds(num_extra))
            saved_s = num_sampled / num_rows * base_s - cost_s
        limit_s = MAX_BALANCE * base_s
        self._balance_s = min(max(self._balance_s + LOSS_SHARE * seconds + saved_s, -2 * limit_s), limit_s)
        self._num_quiet = 0 if num_extra else self._num_quiet + 1
        if self._num_quiet >= NUM_PROBES and times.is_trusted(0):
            self._num_quiet = 0
            share = (BOOKKEEPING_S + ROW_BOOKKEEPING_S * num_rows) / max(base_s, 1e-9)
            num_steps = int(NUM_PROBES * share / BOOKKEEPING_SHARE)
            self._num_left_to_rest = num_steps if num_steps > NUM_PROBES else 0
        return saved_s

    def _observe_base(self, times: StepTimes, seconds: float, num_extra: int = 0) -> None:
        times.observe(num_extra, seconds)
        if not times.has_credit and times.is_trusted(0):
            times.has_credit = True
            self._balance_s += CREDIT * times.seconds(0)

    def _observe_probe(self, num_rows: int, seconds: float) -> float:
        """Learn from a step that had no drafts and was not launched ahead, on a device that runs ahead: it has cost
        time, so the policy rests. Return the time that it has saved, which is negative."""
        times = self._times_of(num_rows)
        base_s, is_measured = times.seconds(0), times.is_trusted(0)
        saved_s = max(min(base_s - seconds, 0.0), -base_s) if is_measured else 0.0
        self._balance_s = max(self._balance_s + LOSS_SHARE * seconds + saved_s, -2 * MAX_BALANCE * base_s)
        is_short = not is_measured or self._is_base_due(times) or self._is_rich(base_s)
        self._num_idle, self._num_busy = self._num_idle + 1, 0
        if not self._num_left_to_rest:
            self._num_rows_at_rest = num_rows
            self._num_left_to_rest = NUM_UNSETTLED + NUM_MEASURED if is_short else REST * self._far_factor
        return saved_s

    def _is_base_due(self, times: StepTimes) -> bool:
        """Return whether so many steps had drafts that the time of one without them should be measured again."""
        if not self.is_ahead:
            return self._num_busy >= BASE_INTERVAL
        interval = CLOSE_BASE_INTERVAL if self._ratio < CLOSE else AHEAD_BASE_INTERVAL
        if self._ratio < SURE:
            interval = min(interval, INTERVAL_OF_EACH * times.num_seen(0))
        return self._num_busy >= interval

    @property
    def _far_factor(self) -> int:
        return FAR_FACTOR if self.is_ahead and self._ratio < FAR else 1

    def _is_rich(self, base_s: float) -> bool:
        """Return whether earlier drafts have saved so much that it is better to go on for a while if the acceptance
        seems to have become low: only further drafts tell whether it has, and a rest takes many steps."""
        return self.is_ahead and self._balance_s > MAX_BALANCE / 2 * base_s

    def observe_beside_prompts(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that has also computed prompts."""
        token_s = seconds / num_tokens
        self._prompt_token_s += (token_s - self._prompt_token_s) * (0.1 if self._prompt_token_s else 1)

    def _times_of(self, num_rows: int) -> StepTimes:
        growth = AHEAD_GROWTH if self.is_ahead else GROWTH
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


def _best_number(
    groups: Sequence[Group], sizes: tuple[int, int], times: StepTimes, draft_s: Callable[[int], float]
) -> tuple[float, int]:
    """Return the highest expected rate of tokens, and the number of drafts that has it. `sizes` are the rows of the
    step and its other tokens beyond one for each row.

    Within a group, the rate has its maximum at one of the ends or where the slope of the step's time changes: between
    them it is the ratio of two linear functions.
    """
    (num_rows, num_extra), best = sizes, (0.0, 0)
    num_before, expected, depth, drafting_s = 0, float(num_rows), 0, 0.0
    for probability, position, indices in groups:
        if position >= depth:
            depth, drafting_s = position + 1, draft_s(position + 1)
        first, last = num_extra + num_before + 1, num_extra + num_before + len(indices)
        for place in (first, *times.known_between(first, last), last):
            number = place - num_extra
            rate = (expected + probability * (number - num_before)) / (times.seconds(place) + drafting_s)
            best = max(best, (rate, number), key=lambda each: each[0])
        num_before, expected = num_before + len(indices), expected + probability * len(indices)
    return best
