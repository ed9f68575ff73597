"""Gain of drafts on a device that runs ahead, on a logical clock: the policy finds the best number of drafts from the
times of its own steps, and costs little where none pays."""

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from engine.core.types import Row
from engine.executors.speculation.mtp_proposer import MAX_PLAIN_STEPS
from engine.executors.speculation.policy import MIN_GAIN, DraftPolicy
from engine.executors.speculation.requests import FIRST_SHARE, SHARE_DECAY

MAX_DRAFTS = 3
ANSWER = 1000  # steps of the requests of a batch
BALANCED = 0.75  # acceptance of most cases


class Device(NamedTuple):
    """Times in milliseconds: of a step that is launched ahead, of one that verifies drafts and of each draft in it, and
    of a run of the draft model with each of its steps. Steps that are not launched ahead wait for the host. `read`: of
    reading the hidden states of MAX_PLAIN_STEPS steps that were launched ahead."""

    ahead: float
    verify: float
    verify_draft: float
    run: float
    run_step: float
    wait: float = 0.6
    read: float = 0.0

    def rates(self, num_rows: int, acceptance: float) -> list[float]:
        """Return the tokens of a millisecond for each fixed number of drafts of a row."""
        rates = [num_rows / self.ahead]
        for count in range(1, MAX_DRAFTS + 1):
            tokens = num_rows * sum(acceptance**position for position in range(count + 1))
            step = self.verify + self.verify_draft * num_rows * count
            rates.append(tokens / (step + self.run + self.run_step * count))
        return rates


def simulate(
    device: Device, num_rows: int, acceptance_at: Callable[[int], float], num_steps: int
) -> list[tuple[int, float]]:
    """Return the tokens and milliseconds of each step. `acceptance_at` returns the acceptance of a step."""
    policy, rng = DraftPolicy(runs_ahead=True), random.Random(0)
    was_paused = False
    rows = [Row(slot, 0, [0], ()) for slot in range(num_rows)]
    shares, steps, num_passed, is_able = [FIRST_SHARE] * num_rows, [], 0, True
    for number in range(num_steps):
        if number % ANSWER == 0:
            is_able = True  # other requests, whose hidden states are all there
        if policy.is_paused:
            if not was_paused:
                policy.begin_pause()
            num_passed = num_passed % MAX_PLAIN_STEPS + 1
            is_able &= num_passed < MAX_PLAIN_STEPS or policy.may_draft
            reads = is_able and num_passed == MAX_PLAIN_STEPS
            step = device.ahead + device.wait * (not was_paused) + device.read * reads
            policy.observe_pause(step / 1e3, rows, is_usual=not reads)
            steps.append((num_rows, step))
            was_paused = True
            continue
        was_paused, levels, counts = False, [min(int(4 * share), 3) for share in shares], [0] * num_rows
        num_passed = 0
        if policy.may_draft and is_able:
            offers = [(level, MAX_DRAFTS) for level in levels]
            counts = policy.choose(num_rows, 0, offers)
        depth, num_drafts, num_accepted = max(counts), sum(counts), 0
        for index, count in enumerate(counts):
            right = next((place for place in range(count) if rng.random() > acceptance_at(number)), count)
            if count:
                num_accepted += right
                num_known = min(right + 1, count)
                policy.acceptance.record(levels[index], right, num_known)
                shares[index] += (1 - SHARE_DECAY) * (right / num_known - shares[index])
        run = device.run + device.run_step * depth if depth else 0.02
        step = device.verify + device.verify_draft * num_drafts if depth else device.ahead + device.wait
        policy.observe(num_rows, num_drafts, num_rows + num_accepted, (step / 1e3, run / 1e3))
        steps.append((num_rows + num_accepted, step + run))
    return steps


def rate(steps: list[tuple[int, float]]) -> float:
    return sum(tokens for tokens, _ in steps) / sum(time for _, time in steps)


# The times of the models of docs/benchmarks.md, and of others whose drafts pay by about 10% or by much.
PAYING = [
    pytest.param(1, Device(3.77, 4.7, 0.02, 0.3, 0.65), id="draft model, 1"),
    pytest.param(8, Device(4.05, 5.0, 0.02, 0.4, 0.7), id="draft model, 8", marks=pytest.mark.slow),
    pytest.param(1, Device(4.02, 4.9, 0.02, 0.3, 0.33), id="EAGLE-3, 1", marks=pytest.mark.slow),
    pytest.param(64, Device(8.6, 13.0, 0.02, 0.7, 0.7), id="MTP, 64"),
    pytest.param(1, Device(4.0, 4.9, 0.02, 0.3, 1.5), id="12%, 1", marks=pytest.mark.slow),
    pytest.param(16, Device(4.4, 6.9, 0.05, 0.3, 0.5), id="8%, 16", marks=pytest.mark.slow),
    pytest.param(256, Device(15.0, 18.0, 0.018, 1.0, 1.5), id="10%, 256"),
    pytest.param(1, Device(4.0, 4.3, 0.02, 0.1, 0.15), id="greatly, 1"),
    pytest.param(16, Device(4.4, 4.9, 0.005, 0.2, 0.2), id="greatly, 16", marks=pytest.mark.slow),
    pytest.param(256, Device(15.0, 16.0, 0.002, 1.0, 1.0), id="greatly, 256"),
]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "device"), PAYING)
def test_the_best_number_of_drafts_is_found(num_rows, device):
    rates = device.rates(num_rows, BALANCED)
    assert max(rates) > 1.07 * rates[0]
    num_steps = 8000 if num_rows == 1 else 2000 if num_rows < 256 else 600
    steps = simulate(device, num_rows, lambda step: BALANCED, num_steps)
    assert rate(steps[num_steps // 2 :]) > 0.97 * max(rates)


@pytest.mark.parametrize(
    ("num_rows", "device", "acceptance"),
    [
        pytest.param(1, Device(1.67, 2.6, 0.25, 0.35, 0.45), BALANCED, id="MTP, 1"),
        pytest.param(1, Device(1.68, 2.1, 0.22, 0.3, 0.48, 1.0, 1.5), BALANCED, id="MTP, 1, nearly paying"),
        pytest.param(1, Device(1.68, 2.6, 0.25, 0.35, 0.45, 1.0, 3.0), BALANCED, id="MTP, 1, reading slowly"),
        pytest.param(8, Device(4.0, 6.5, 0.12, 0.45, 0.55), BALANCED, id="MTP, 8"),
        pytest.param(64, Device(5.36, 7.6, 0.02, 0.6, 0.9), BALANCED, id="draft model, 64"),
        pytest.param(1, Device(4.0, 6.0, 0.5, 0.4, 1.5), BALANCED, id="slow, 1"),
        pytest.param(16, Device(4.4, 8.0, 0.1, 0.5, 0.8), BALANCED, id="slow, 16"),
        pytest.param(256, Device(15.0, 18.0, 0.03, 1.0, 1.0), BALANCED, id="slow, 256"),
        pytest.param(1, Device(4.0, 4.9, 0.02, 0.3, 0.33), 0.0, id="wrong, 1"),
        pytest.param(16, Device(4.4, 5.0, 0.01, 0.3, 0.3), 0.0, id="wrong, 16"),
        pytest.param(256, Device(15.0, 18.0, 0.02, 1.0, 1.0), 0.1, id="wrong, 256"),
    ],
)
def test_looking_for_a_gain_costs_at_most_one_percent_where_there_is_none(num_rows, device, acceptance):
    rates = device.rates(num_rows, acceptance)
    assert max(rates) < MIN_GAIN * rates[0]
    steps = simulate(device, num_rows, lambda step: acceptance, 4000)
    assert rate(steps) > 0.99 * rates[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "device"),
    [(1, Device(4.0, 4.9, 0.02, 0.3, 0.33)), (16, Device(4.4, 4.9, 0.01, 0.3, 0.3))],
)
@pytest.mark.parametrize(("before", "after"), [(0.1, BALANCED), (BALANCED, 0.1)])
def test_a_change_of_the_acceptance_is_noticed(num_rows, device, before, after):
    steps = simulate(device, num_rows, lambda step: before if step < 1000 else after, 6000)
    assert rate(steps[4000:]) > 0.97 * max(device.rates(num_rows, after))
