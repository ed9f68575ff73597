"""The number of draft tokens, chosen from given step times: the best rate wins, and wrong guesses cost little."""

import random

import pytest

from engine.core.types import Row
from engine.executors.speculation.estimates import OPTIMISM, AcceptanceRates, StepTimes
from engine.executors.speculation.policy import LOSS_SHARE, MAX_BALANCE, MAX_READING, MIN_GAIN, DraftPolicy

MEMORY_BOUND = {"rows_s": 0.0, "extra_s": 0.0005}  # more tokens cost nearly nothing
COMPUTE_BOUND = {"rows_s": 0.01, "extra_s": 0.01}


def simulate(policy, num_rows, share_correct, num_steps, costs):
    """Run steps of 10 ms plus so much for each row and each draft; each draft is right with the same probability.
    Return the numbers of chosen drafts, all sampled tokens and the time of all steps."""
    rng, chosen, num_tokens, total_s = random.Random(0), [], 0, 0.0
    rows_s, extra_s, draft_s = (costs.get(name, 0.0) for name in ("rows_s", "extra_s", "draft_s"))
    for _ in range(num_steps):
        seconds = 0.01 + rows_s * num_rows
        offers = [(0, 4)] * num_rows if policy.may_draft else []
        counts = policy.choose(num_rows, 0, offers)
        num_correct = [next((i for i in range(4) if rng.random() > share_correct), 4) for _ in counts]
        for right in num_correct:
            policy.acceptance.record(0, right, 4)
        seconds += extra_s * sum(counts)
        num_sampled = num_rows + sum(map(min, counts, num_correct))
        policy.observe(num_rows, sum(counts), num_sampled, (seconds, draft_s * bool(offers)))
        chosen.append(sum(counts))
        num_tokens, total_s = num_tokens + num_sampled, total_s + seconds + draft_s * bool(offers)
    return chosen, num_tokens, total_s


def simulate_ahead(policy, num_rows, share_correct, num_steps, costs):
    """Return the time of each token, relative to steps of 10 ms that are launched ahead. Other steps take 3 ms more,
    and each draft so much. The first step of a pause waits for the device."""
    rng, num_tokens, total_s = random.Random(0), 0, 0.0
    rows = [Row(slot, 0, [0], ()) for slot in range(num_rows)]
    was_paused = False
    for _ in range(num_steps):
        if policy.is_paused:
            if not was_paused:
                policy.begin_pause()
            seconds, was_paused = 0.01 if was_paused else 0.013, True
            policy.observe_pause(seconds, rows)
            num_tokens, total_s = num_tokens + num_rows, total_s + seconds
            continue
        was_paused = False
        counts = policy.choose(num_rows, 0, [(0, 4)] * num_rows) if policy.may_draft else [0]
        num_correct = [next((i for i in range(4) if rng.random() > share_correct), 4) for _ in counts]
        for right, count in zip(num_correct, counts, strict=True):
            policy.acceptance.record(0, min(right, count), count)
        seconds, draft_s = 0.013 + costs["extra_s"] * sum(counts), costs["draft_s"] * max(counts)
        num_sampled = num_rows + sum(map(min, counts, num_correct))
        policy.observe(num_rows, sum(counts), num_sampled, (seconds, draft_s))
        num_tokens, total_s = num_tokens + num_sampled, total_s + seconds + draft_s
    return total_s / num_tokens / (0.01 / num_rows)


@pytest.mark.parametrize(("num_rows", "share_correct", "extra_s"), [(1, 0.0, 0.0), (1, 0.5, 0.01), (32, 0.7, 0.0003)])
def test_drafts_that_do_not_pay_cost_little_where_steps_of_a_pause_are_faster(num_rows, share_correct, extra_s):
    assert (
        simulate_ahead(
            DraftPolicy(runs_ahead=True), num_rows, share_correct, 4000, {"extra_s": extra_s, "draft_s": 0.002}
        )
        < 1.02
    )


@pytest.mark.parametrize(("num_rows", "share_correct", "least"), [(1, 0.95, 2.2), (1, 0.75, 1.5), (8, 0.75, 1.5)])
def test_drafts_that_pay_are_found_where_steps_of_a_pause_are_faster(num_rows, share_correct, least):
    costs = {"extra_s": 0.0002 / num_rows, "draft_s": 0.001}
    assert simulate_ahead(DraftPolicy(runs_ahead=True), num_rows, share_correct, 2000, costs) < 1 / least


def test_all_drafts_are_verified_where_tokens_cost_nothing_and_drafts_are_right():
    chosen, num_tokens, total_s = simulate(DraftPolicy(), 1, 0.95, 400, MEMORY_BOUND)
    assert chosen[-50:].count(4) > 45
    assert num_tokens / total_s > 3.5 / 0.01


def test_few_drafts_are_verified_if_only_the_first_are_right():
    chosen, num_tokens, total_s = simulate(DraftPolicy(), 1, 0.5, 2000, {"extra_s": 0.002})
    assert max(chosen[200:], key=chosen[200:].count) in (1, 2)
    assert num_tokens / total_s > 1.2 / 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "share_correct", "costs"),
    [
        pytest.param(1, 0.0, MEMORY_BOUND, id="wrong drafts"),
        pytest.param(1, 0.2, {"extra_s": 0.005}, id="dear tokens"),
        pytest.param(32, 0.7, COMPUTE_BOUND, id="many requests"),
        pytest.param(32, 0.0, COMPUTE_BOUND, id="many requests and wrong drafts"),
        pytest.param(4, 0.3, {"extra_s": 0.001, "draft_s": 0.01}, id="slow drafting"),
    ],
)
def test_drafts_that_do_not_pay_cost_less_than_one_percent(num_rows, share_correct, costs):
    num_steps = 4000
    chosen, num_tokens, total_s = simulate(DraftPolicy(), num_rows, share_correct, num_steps, costs)
    without_s = (0.01 + costs.get("rows_s", 0) * num_rows) / num_rows  # per token
    assert total_s / num_tokens < 1.01 * without_s
    assert sum(count > 0 for count in chosen) < num_steps / 50


def test_drafting_begins_again_when_the_text_repeats():
    policy = DraftPolicy()
    simulate(policy, 1, 0.0, 3000, MEMORY_BOUND)
    chosen, _, _ = simulate(policy, 1, 1.0, 600, MEMORY_BOUND)
    assert chosen[-100:].count(4) > 90


def test_the_balance_limits_what_a_change_of_the_load_can_cost():
    """The acceptance says that all drafts are right, the steps say that they are not worth it."""
    policy, total_s = DraftPolicy(), 0.0
    for _ in range(2000):
        policy.acceptance.record(0, 4, 4)
        [count] = policy.choose(1, 0, [(0, 4)])
        policy.observe(1, count, 1, (0.01 * (1 + count), 0.0))  # as if no draft were ever accepted
        total_s += 0.01 * (1 + count)
    assert total_s / (2000 * 0.01) < 1 + LOSS_SHARE + 2 * MAX_BALANCE / 2000


def test_the_surest_drafts_are_chosen_first():
    policy = DraftPolicy()
    for _ in range(50):
        policy.acceptance.record(3, 4, 4)
        policy.acceptance.record(0, 0, 4)
        policy.observe(2, 0, 2, (0.01, 0.0))
        for extra in (4, 8):
            policy.observe(2, extra, 2 + extra, (0.01 + 0.002 * extra, 0.0))
    assert policy.choose(2, 0, [(0, 4), (3, 4)]) == [0, 4]


def test_beside_prompts_only_drafts_are_verified_that_save_more_than_they_cost():
    policy = DraftPolicy()
    for _ in range(20):
        policy.acceptance.record(1, 1, 2)  # the first is right, the second is wrong
        policy.observe(1, 0, 1, (0.01, 0.0))
        policy.observe_beside_prompts(100, 0.2)
    assert policy.choose_beside_prompts(1, [(1, 2)]) == [1]
    policy.observe_beside_prompts(100, 20.0)
    assert policy.choose_beside_prompts(1, [(1, 2)]) == [0]


@pytest.mark.parametrize(("num_rows", "step_s", "share"), [(1, 0.0003, 0.98), (8, 0.001, 0.97), (8, 0.1, 0.0)])
def test_bookkeeping_stops_where_it_would_take_more_than_its_share(num_rows, step_s, share):
    policy, num_paused = DraftPolicy(), 0
    for _ in range(10_000):
        if policy.is_paused:
            policy.observe_pause(step_s)
            num_paused += 1
        else:
            policy.observe(num_rows, 0, num_rows, (step_s, 0.0))
    assert num_paused >= share * 10_000
    assert share or not num_paused


def test_step_times_are_interpolated_and_follow_the_context():
    times = StepTimes(2)
    for extra, seconds in ((0, 0.01), (4, 0.02)):
        for _ in range(16):
            times.observe(extra, seconds)
    assert times.seconds(2) == pytest.approx(0.015, rel=0.01)
    assert times.seconds(8) == pytest.approx(0.03, rel=0.01)
    for _ in range(30):
        times.observe(4, 0.04)
    assert times.seconds(4) == pytest.approx(0.04, rel=0.05)
    assert times.seconds(0) == pytest.approx(0.01 / (1 + (30 + 16) * OPTIMISM))  # it has not been measured again
    assert times.measured(0) == pytest.approx(0.01)


def test_the_time_of_a_step_that_was_never_measured_is_that_of_the_closest_number_of_rows():
    """It limits how long prompts are read: without a limit, each new number of rows would read them again."""
    policy = DraftPolicy()
    assert policy.step_s(5) == 0.0
    for num_rows in (2, 8):
        policy.observe(num_rows, 0, num_rows, (0.01 * num_rows, 0.0))
    assert [policy.step_s(num_rows) for num_rows in (1, 2, 6, 30)] == [0.02, 0.02, 0.08, 0.08]


def test_a_single_slow_measurement_does_not_decide():
    times = StepTimes(1)
    for seconds in (0.05, 0.01, 0.01, 0.01):
        times.observe(0, seconds)
    assert times.seconds(0) == pytest.approx(0.01, rel=0.5)


def test_acceptance_is_counted_by_level_and_position():
    acceptance = AcceptanceRates()
    for _ in range(100):
        acceptance.record(0, 2, 4)
        acceptance.record(1, 0, 1)
    first, second, third, _ = acceptance.expected(0, 4)
    assert first >= second > 0.95 > 0.1 > third
    assert acceptance.expected(1, 2)[0] < 0.1


@pytest.mark.parametrize("step_s", [0.0065, 0.0105, 0.0152])
def test_steps_without_drafts_are_measured_the_sooner_the_less_drafts_gain(step_s):
    """All drafts are right, so the rate is about 2.46, 1.52 or 1.05 times that of steps without drafts, of 4 ms."""
    policy, row = DraftPolicy(runs_ahead=True), Row(0, 0, [0], ())
    policy.observe(1, 0, 1, (0.004, 0.0))
    num_paused = 0
    while policy.is_paused:
        policy.observe_pause(0.004, [row])
        num_paused += 1
    assert num_paused == 6  # the first two are not measured
    for _ in range(200):
        policy.acceptance.record(3, 3, 3)
    num_found = 0
    while num_found < 5000 and policy.choose(1, 0, [(3, 3)]) == [3]:
        policy.acceptance.record(3, 3, 3)
        policy.observe(1, 3, 4, (step_s, 0.0))
        num_found += 1
    assert num_found == pytest.approx((4 * 0.004 / step_s / MIN_GAIN - 1) / OPTIMISM, rel=0.1)
    policy.observe(1, 0, 1, (0.004, 0.0))
    assert policy.is_paused


def test_reading_states_in_a_pause_is_paid_from_the_balance_and_measures_nothing():
    policy, row = DraftPolicy(runs_ahead=True), Row(0, 0, [0], ())
    policy.observe(1, 0, 1, (0.004, 0.0))
    while policy.is_paused:
        policy.observe_pause(0.004, [row])
    before_s = policy._balance_s
    for seconds in (0.006, 0.002, 0.009):
        policy.observe_pause(seconds, [row], is_usual=False)
    assert policy._balance_s == pytest.approx(before_s - 0.005 + LOSS_SHARE * 0.017)
    policy.observe_pause(10.0, [row], is_usual=False)  # another process has taken the CPU
    assert policy._balance_s > before_s - 0.005 - MAX_READING * 0.004
    assert policy._times[1].measured(0) == pytest.approx(0.004)


def test_wrong_first_measurements_change_no_time_of_another_number_of_tokens():
    """A step seems short if the end of the step before was noticed late."""
    times = StepTimes(1)
    for seconds in (0.006, 0.002, 0.006):
        times.observe(0, seconds)
    assert times.measured(0) == 0.006
    for seconds in (*[0.01] * 3, *[0.014] * 12):
        times.observe(3, seconds)
    assert times.seconds(3) == pytest.approx(0.014, rel=0.05)
    assert times.measured(0) == 0.006


def test_nothing_follows_from_an_unusual_step_but_its_cost():
    policy = DraftPolicy()
    for seconds in (0.01, 0.01, 0.01):
        policy.observe(1, 0, 1, (seconds, 0.0))
    for _ in range(3):
        policy.observe(1, 2, 3, (0.012, 0.001))
    before, balance_s = policy.choose(1, 0, [(0, 2)]), policy._balance_s
    policy.observe(1, 2, 3, (0.2, 0.1), is_usual=False)
    assert policy._times[1].measured(2) == pytest.approx(0.013)
    assert policy._balance_s < balance_s - 0.2
    policy._balance_s = balance_s
    assert policy.choose(1, 0, [(0, 2)]) == before == [2]
