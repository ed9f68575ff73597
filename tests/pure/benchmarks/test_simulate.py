"""The simulator: arithmetic of step times, the logical clock, and replicas that fail."""

import asyncio
import random
import statistics

import pytest

from benchmarks.simulate.__main__ import DEMO_MODEL
from benchmarks.simulate.coarse import simulate_coarsely
from benchmarks.simulate.logical_loop import NoEventLeft, run
from benchmarks.simulate.replicas import Cluster, FrontEnd, simulate
from benchmarks.simulate.server import SimulatedServer
from benchmarks.simulate.step_time import StepTimes, work_of
from benchmarks.simulate.traffic import Arrival, arrivals, chats, new_prompts, num_tokens_of, token_ids
from engine.core.types import Batch, Row

TIMES = StepTimes(0.004, 0.0002, 0.0004, 1e-7)


def a_request(name, at, num_chars, num_tokens):
    body = {"req_id": name, "messages": [{"role": "user", "content": "x" * num_chars}]}
    return Arrival(at, {**body, "max_dec_len": num_tokens, "min_dec_len": num_tokens})


def test_the_work_of_a_step_is_counted_in_prompt_tokens_answer_tokens_and_attended_positions():
    rows = [Row(0, 10, [1]), Row(1, 0, [1, 2, 3], num_sampled=0), Row(2, 4, [1, 2])]
    assert work_of(Batch(rows)) == (5, 1, 11 + (1 + 2 + 3) + (5 + 6))
    assert TIMES.duration((5, 1, 28)) == pytest.approx(0.004 + 5 * 0.0002 + 0.0004 + 28e-7)


def test_a_fit_finds_the_proportions_of_step_times_although_some_waited_for_other_work_and_their_sum():
    rng = random.Random(0)
    works = [(rng.choice((0, 0, rng.randint(1, 256))), rng.randint(0, 20), rng.randint(1, 9000)) for _ in range(500)]
    steps = [(work, TIMES.duration(work) + rng.choice([0] * 9 + [0.1])) for work in works]
    fitted, factor = StepTimes.fitted(steps), sum(s for _, s in steps) / sum(TIMES.duration(w) for w, _ in steps)
    assert factor > 1.2
    assert sum(fitted.duration(work) for work in works) == pytest.approx(sum(seconds for _, seconds in steps))
    for name in ("step_s", "prompt_token_s", "answer_token_s", "position_s"):
        assert getattr(fitted, name) == pytest.approx(factor * getattr(TIMES, name), rel=0.02), name
    falling = StepTimes.fitted([((work[0], 0, 0), 1.0 - work[0] / 1000) for work in works])
    assert falling.prompt_token_s == 0 and falling.step_s > 0


def test_a_request_alone_takes_the_sum_of_its_steps():
    request = a_request("a", 0.0, 400, 10)
    num_prompt_tokens = len(token_ids(request.body["messages"]))
    result = simulate(Cluster(1, TIMES), [request])
    positions = num_prompt_tokens * (num_prompt_tokens + 1) // 2
    ttft_s = TIMES.duration((num_prompt_tokens, 0, positions))
    decode_s = sum(TIMES.duration((0, 1, num_prompt_tokens + i)) for i in range(1, 10))
    assert result.ttft_s == [pytest.approx(ttft_s)]
    assert result.e2e_s == [pytest.approx(ttft_s + decode_s)]
    assert result.num_steps == 10 and result.num_lost == 0


def test_a_request_that_arrives_during_a_step_is_in_the_step_after_the_next_one():
    times = StepTimes(1.0, 0.0, 0.0)
    result = simulate(Cluster(1, times), [a_request("a", 0.0, 40, 10), a_request("b", 0.5, 40, 2)])
    assert sorted(result.ttft_s) == [pytest.approx(1.0), pytest.approx(2.5)]


@pytest.mark.slow
def test_a_simulation_depends_on_its_seeds_only():
    cluster = Cluster(4, TIMES, failures_per_minute=6.0)
    results = [simulate(cluster, arrivals(seed, 10, 6, 32), 5) for seed in (1, 1, 2)]
    assert results[0] == results[1] != results[2] and results[0].num_kills > 0
    assert simulate(cluster, arrivals(1, 10, 6, 32), 6) != results[0]


@pytest.mark.slow
def test_no_request_is_lost_when_replicas_fail_and_their_answers_continue_at_others():
    traffic = list(arrivals(3, 20, 20, 64))
    result = simulate(Cluster(3, TIMES, failures_per_minute=6.0, restart_s=2.0), traffic, 1)
    assert result.num_kills > 2 and result.num_continued > result.num_kills
    assert result.num_lost == 0 and len(result.e2e_s) == len(result.ttft_s) == len(traffic)
    assert 0.3 < result.hit_rate < simulate(Cluster(3, TIMES), traffic, 1).hit_rate


@pytest.mark.thorough
@pytest.mark.slow
def test_front_ends_that_do_not_know_of_each_others_last_requests_spread_the_load():
    cluster = Cluster(3, DEMO_MODEL, are_front_ends=True, num_clients=12)
    results = [simulate(cluster, new_prompts(seed, 90, 64)) for seed in range(8)]
    assert all(len(each.e2e_s) == 90 for each in results)
    assert statistics.mean(each.load_max_over_mean for each in results) < 1.07
    assert simulate(cluster, new_prompts(0, 90, 64)) == results[0]
    assert simulate(cluster, new_prompts(0, 360, 64)).num_forwarded < 90  # the others are computed where they are asked


@pytest.mark.slow
def test_three_front_ends_find_the_prefixes_that_a_single_server_finds():
    found = simulate(Cluster(3, DEMO_MODEL, are_front_ends=True, num_clients=8), chats(1, 1500))
    assert found.hit_rate >= 0.95 * simulate(Cluster(1, DEMO_MODEL, num_clients=8), chats(1, 1500)).hit_rate
    assert found.load_max_over_mean <= 1.25


def test_requests_wait_while_every_replica_is_down_and_are_refused_when_none_comes_back():
    traffic = [a_request("a", 20.0, 400, 100)]
    forever = Cluster(1, TIMES, failures_per_minute=60.0, restart_s=1e6)
    assert simulate(forever, traffic, 1).num_lost == 1
    soon = Cluster(1, TIMES, failures_per_minute=10.0, restart_s=3.0)
    results = [simulate(soon, traffic, seed) for seed in range(20)]
    assert sum(each.num_lost for each in results) == 0
    assert any(each.ttft_s[0] > 1 for each in results)  # it was down when the request came


def test_a_replica_that_does_not_answer_polls_is_lost_after_two_seconds_of_the_clock():
    async def scenario():
        cluster = Cluster(1, TIMES)
        server = SimulatedServer("a", TIMES, 100, cluster.config)
        [replica] = FrontEnd([server], cluster.config).others
        await asyncio.sleep(10.1)
        assert replica.is_ready

        async def silent(request, timeout_s):  # as a machine whose power is cut
            await asyncio.sleep(timeout_s)
            raise ConnectionError("no answer")

        server.poll = silent
        await asyncio.sleep(1.0)
        was_ready = replica.is_ready
        await asyncio.sleep(1.6)
        return was_ready, replica.reason

    assert run(scenario()) == (True, "no answer for 2 s")


def test_waiting_for_what_cannot_happen_is_an_error_and_no_endless_loop():
    async def wait():
        await asyncio.sleep(5)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NoEventLeft, match="no event is left"):
        run(wait())


# --- coarse simulation ------------------------------------------------------------------------------------------------


def test_the_tokens_of_a_prompt_are_those_of_its_messages_and_the_header_of_the_answer():
    for arrival in arrivals(1, 10, 5, 32):
        messages = arrival.body["messages"]
        header = num_tokens_of({"role": "assistant", "content": ""})
        assert len(token_ids(messages)) == sum(map(num_tokens_of, messages)) + header


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("rate", (20, 100))
def test_the_coarse_simulation_agrees_with_that_of_every_step(rate):
    cluster = Cluster(10, TIMES)
    results = [simulate_of(cluster, arrivals(0, rate, 15, 32)) for simulate_of in (simulate, simulate_coarsely)]
    for name in ("ttft_s", "e2e_s"):
        exact, coarse = (statistics.median(getattr(result, name)) for result in results)
        assert coarse == pytest.approx(exact, rel=0.1), name
    assert results[1].hit_rate == pytest.approx(results[0].hit_rate, abs=0.05)


@pytest.mark.slow
def test_the_coarse_simulation_depends_on_its_seeds_and_loses_nothing():
    cluster = Cluster(50, TIMES, failures_per_minute=6.0, restart_s=5.0)
    results = [simulate_coarsely(cluster, arrivals(1, 300, 8, 64), seed) for seed in (1, 1, 2)]
    assert results[0] == results[1] != results[2]
    for result in results:
        assert result.num_kills > 20 and result.num_continued > result.num_kills
        assert result.num_lost == 0 and len(result.e2e_s) == len(result.ttft_s) > 2000


def test_coarse_requests_wait_for_a_place_in_the_batch_and_while_every_replica_is_down():
    traffic = [a_request(str(i), 1.0, 400, 100) for i in range(6)]
    free, full = (simulate_coarsely(Cluster(1, TIMES, batch_size=size), traffic) for size in (6, 2))
    assert max(full.ttft_s) > max(free.e2e_s)
    exact = simulate(Cluster(1, TIMES, batch_size=2), traffic)
    assert max(full.e2e_s) == pytest.approx(max(exact.e2e_s), rel=0.1)
    down = Cluster(1, TIMES, failures_per_minute=600.0, restart_s=3.0)
    assert max(simulate_coarsely(down, traffic, 1).ttft_s) > 1
