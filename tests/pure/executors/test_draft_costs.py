"""The time that a draft model may take for prompts, from given times of its runs."""

import pytest

from engine.executors.speculation.draft_costs import MAX_DEBT, DraftCosts


def with_prompts_read(num_runs):
    """Return the costs of a model that has read prompts of 100 tokens, each in 1 ms."""
    costs = DraftCosts()
    for _ in range(num_runs):
        costs.observe(0, 100, 0.001)
    return costs


def test_prompts_are_read_until_they_have_cost_the_time_of_some_steps():
    step_s, num_read = 0.01, 1
    costs = with_prompts_read(num_read)
    while costs.may_read(100, step_s):
        costs.observe(0, 100, 0.001)
        num_read += 1
    assert num_read == pytest.approx(MAX_DEBT * step_s / 0.001, abs=1)
    costs.repay(0.002, 0.0)
    assert costs.may_read(100, step_s)


def test_one_run_that_another_process_has_slowed_down_does_not_end_reading():
    costs = with_prompts_read(5)
    costs.observe(0, 100, 10.0)
    assert costs.may_read(100, 0.01)
