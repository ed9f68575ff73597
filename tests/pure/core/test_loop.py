"""The loop over scheduler and executor, and what it counts."""

from types import SimpleNamespace

import pytest

from engine.core.limits import PrefillLimits
from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.errors import InvalidRequest, Overloaded
from engine.settings.config import Config
from tests.pure.counting_executor import CountingExecutor, answer


def a_loop(num_blocks=16, block_size=4, **settings):
    return EngineLoop(CountingExecutor(num_blocks, block_size), num_blocks, Config(**settings))


def a_request(prompt, max_new_tokens=4, request_id=""):
    return Request(request_id or str(prompt[0]), list(prompt), len(prompt), Sampling(max_new_tokens, temperature=0))


def test_conversations_that_do_not_fit_the_cache_find_what_they_had_said_on_the_host():
    """SWAP_SPACE: a prompt that begins with an earlier one is computed from where that ended."""
    found = []
    for num_places in (0, 48):
        loop = a_loop(12, swap_space=num_places / 2**30)  # a block is a byte here
        for turn in range(3):
            for first in range(0, 8000, 1000):
                request = a_request(list(range(first, first + 16 + 4 * turn)))
                loop.add(request)
                while not loop.is_idle:
                    loop.step()
                assert request.token_ids == list(range(first, first + 20 + 4 * turn))
        found.append(loop.stats()["num_cached_tokens"])
    assert found == [0, 8 * 16 + 8 * 20]


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({}, None),
        ({"max_num_partial_prefills": 4}, PrefillLimits(4, 1, 327)),
        ({"max_long_partial_prefills": 2, "long_prefill_token_threshold": 9}, PrefillLimits(50, 2, 9)),
    ],
)
def test_the_settings_of_partial_prefills_reach_the_scheduler(settings, limits):
    assert a_loop(**settings).scheduler.limits.prefills == limits


def test_each_turn_brings_what_the_step_launched_before_has_chosen():
    loop = a_loop()
    for first in (10, 20):
        loop.add(a_request([first], 2))
    tokens = []
    while not loop.is_idle:
        tokens.append([(u.request.request_id, u.token_ids, u.finish_reason) for u in loop.step()])
    assert tokens == [[], [("10", [11], None), ("20", [21], None)], [("10", [12], "length"), ("20", [22], "length")]]
    assert loop.step() == []


def test_logprobs_come_with_their_token():
    loop = a_loop()
    loop.add(Request("a", [5], 1, Sampling(1, temperature=0, num_logprobs=2)))
    assert loop.step() == []
    [update] = loop.step()
    [logprobs] = update.logprobs
    assert logprobs.chosen == -6 / 8
    assert logprobs.top == ((6, 0.0), (7, -1.0))


def test_the_counters_tell_what_was_done():
    loop = a_loop(batch_size=2)
    assert loop.stats()["step_time_s"] == 0
    for first in (10, 20, 30):
        loop.add(a_request(range(first, first + 5), 2))
    loop.step()
    stats = loop.stats()
    assert (stats["num_running"], stats["num_waiting"], stats["num_blocks_held"]) == (2, 1, 4)
    assert stats["num_waiting_tokens"] == 5
    while not loop.is_idle:
        loop.step()
    stats = loop.stats()
    assert stats.pop("step_time_s") > 0
    assert stats.pop("step_limit_s") > 0
    assert stats == {
        "num_running": 0,
        "num_waiting": 0,
        "num_blocks": 16,
        "num_blocks_held": 0,
        "num_prefill_instances": 0,
        "block_size": 4,
        "num_steps": 4,
        "num_generated_tokens": 6,
        "num_prompt_tokens": 15,
        "num_cached_tokens": 0,
        "num_tokens_without_state": 0,
        "num_preemptions": 0,
        "num_drafted_tokens": 0,
        "num_accepted_tokens": 0,
        "num_dropped": 0,
        "num_waiting_tokens": 0,
        "num_wasted_tokens": 0,
        "num_remote_prefills": 0,
        "num_remote_prefill_failures": 0,
        "num_pulled_blocks": 0,
        "num_image_queries": 0,
        "num_image_hits": 0,
        "num_images_encoded": 0,
        "image_time_s": 0.0,
        "fingerprint": 0,
        "step_age_s": 0.0,
    }


def test_dropping_is_counted_once_and_harmless_twice():
    loop = a_loop()
    loop.add(a_request([10]))
    loop.step()
    for _ in range(2):
        loop.drop("10")
        assert not loop.is_idle  # a step still writes its blocks
        assert (loop.stats()["num_dropped"], loop.stats()["num_blocks_held"]) == (1, 1)
    assert loop.step() == []
    assert loop.is_idle
    assert loop.stats()["num_blocks_held"] == 0


def test_tokens_of_dropped_requests_are_counted_but_not_those_of_an_answer_that_is_complete():
    loop = a_loop(batch_size=3)
    for first in (10, 20, 30, 40):
        loop.add(a_request(range(first, first + 5), 9))
    for _ in range(3):
        loop.step()
    loop.drop("40")  # it waits
    assert loop.stats()["num_wasted_tokens"] == 0
    loop.drop("10", is_complete=True)
    assert loop.stats()["num_wasted_tokens"] == 0
    loop.drop("20")
    loop.drop("20")
    assert loop.stats()["num_wasted_tokens"] == 5 + 2


def test_a_request_has_begun_when_it_has_been_given_a_place_and_keeps_that_word():
    loop = a_loop(batch_size=1)
    for first in (10, 20):
        loop.add(a_request([first]))
    assert [loop.has_begun(name) for name in ("10", "20")] == [False, False]
    loop.step()
    assert [loop.has_begun(name) for name in ("10", "20", "unknown")] == [True, False, True]
    request = loop.scheduler.running["10"]
    loop.scheduler._queue.preempt(request)
    assert loop.has_begun("10")


def run(loop):
    while not loop.is_idle:
        loop.step()


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "is dropped"])
def test_a_block_that_got_lost_is_noticed_when_the_loop_becomes_idle(ends):
    loop = a_loop()
    loop.add(a_request([10], 2))
    if ends:
        loop.step()
    loop.scheduler.pool.take(1)
    with pytest.raises(AssertionError):
        run(loop) if ends else loop.drop("10")


def test_the_next_step_is_launched_before_the_tokens_of_the_one_before_are_handed_out():
    loop = a_loop()
    loop.add(a_request([10], 3))
    for num_tokens in (0, 1, 1):
        assert sum(len(update.token_ids) for update in loop.step()) == num_tokens
        assert loop.executor.num_running == 1
    assert [update.token_ids for update in loop.step()] == [[13]]
    assert (loop.executor.num_running, loop.is_idle) == (0, True)


def test_an_executor_that_runs_ahead_always_has_a_step_more():
    loop = a_loop()
    loop.executor.runs_ahead = True
    loop.add(a_request([10], 4))
    turns = []
    while not loop.is_idle:
        tokens = [update.token_ids for update in loop.step()]
        turns.append((tokens, loop.executor.num_running))
    assert turns == [([], 1), ([[11]], 1), ([[12]], 1), ([[13]], 1), ([[14]], 0)]
    assert len(loop.executor.batches) == 4  # none for what lies beyond the end


def test_updates_do_not_wait_for_what_has_become_of_remote_prompts():
    """A poll may take as long as hashing a long prompt, which the device computes meanwhile."""
    loop, order = a_loop(), []
    loop.executor.runs_ahead = True
    finish, launch = loop.executor.finish, loop.executor.launch
    loop.executor.finish = lambda: (order.append("result"), finish())
    loop.executor.launch = lambda batch: order.append("launch") or launch(batch)
    loop.serve_prefills(SimpleNamespace(poll=lambda: order.append("poll"), take=lambda updates: updates, num_open=0))
    loop.add(a_request([10], 4))
    loop.step()
    for _ in range(3):
        order.clear()
        assert loop.step()
        assert order == ["poll", "launch", "result"]


def test_a_step_waits_for_the_one_before_if_a_remote_prompt_that_needs_it_arrives_meanwhile():
    loop = a_loop()
    loop.executor.runs_ahead = True
    penalized = Request("a", [20], 1, Sampling(3, temperature=0, repetition_penalty=1.5))
    loop.add(a_request([10], 6))
    loop.step()
    arrivals = [penalized]
    poll = lambda: loop.scheduler.add(arrivals.pop()) if arrivals else None  # noqa: E731
    loop.serve_prefills(SimpleNamespace(poll=poll, take=lambda updates: updates, num_open=0))
    lengths = {"10": 0, "a": 0}
    while not loop.is_idle:
        for update in loop.step():
            lengths[update.request.request_id] += len(update.token_ids)
    assert lengths == {"10": 6, "a": 3}


def test_a_step_grows_older_while_its_result_is_awaited():
    """The statistics show the age of the step, so that a caller can detect that it hangs."""
    loop, seen = a_loop(), []
    finish = loop.executor.finish
    loop.executor.finish = lambda: (seen.append(loop.stats()), finish())
    loop.add(a_request([10], 2))
    loop.step()
    loop.step()
    assert seen[0]["step_age_s"] > 0
    loop.step()
    assert loop.stats()["step_age_s"] == 0


def test_a_stop_id_ends_an_answer_whose_next_step_runs_already():
    loop = a_loop()
    loop.executor.runs_ahead = True
    loop.add(Request("a", [10], 1, Sampling(9, temperature=0, stop_token_ids=(12,))))
    loop.add(a_request([20], 4))
    ends = {}
    while not loop.is_idle:
        ends |= {update.request.request_id: update.finish_reason for update in loop.step()}
    assert ends == {"a": "stop", "20": "length"}
    assert [len(rows) for rows in loop.executor.batches] == [2, 2, 2, 1]
    assert loop.stats()["num_generated_tokens"] == 6


def test_the_settings_limit_the_schedule():
    loop = a_loop(batch_size=2, max_num_batched_tokens=5, max_cached_task_num=1, block_ratio=1.0)
    for first in (10, 20, 30):
        loop.add(a_request(range(first, first + 4), 1))
    with pytest.raises(Overloaded, match=r"1 requests are waiting, at most MAX_CACHED_TASK_NUM\(1\) may"):
        loop.add(a_request([40]))
    loop.step()
    assert loop.executor.batches == [[("10", 4), ("20", 1)]]


def test_a_step_has_room_for_prompts_beside_a_full_batch_whatever_the_settings():
    loop = a_loop(batch_size=4, max_num_batched_tokens=1)
    loop.add(a_request(range(10, 30), 1))
    loop.step()
    assert loop.executor.batches == [[("10", 8)]]


def test_without_prefix_caching_every_prompt_is_computed():
    for caching, num_cached in ((True, 4), (False, 0)):
        loop = a_loop(enable_prefix_caching=caching)
        for name in ("first", "second"):
            loop.add(a_request([1, 2, 3, 4, 5], 1, name))
            loop.step()
        assert loop.stats()["num_cached_tokens"] == num_cached


def test_a_request_that_cannot_fit_is_refused():
    with pytest.raises(InvalidRequest, match="need 2 KV blocks of 4 tokens, the server has 1"):
        a_loop(num_blocks=1).add(a_request([1, 2, 3, 4], 2))


def cost_of(*groups):
    """Return how many prompt tokens are computed for groups of a request and its forks, and the most blocks held."""
    loop = a_loop(64 * 8, 64, batch_size=8, max_num_batched_tokens=1024, enable_prefix_caching=False, block_ratio=1)
    held = 0
    for first, *forks in groups:
        first.forks = forks
        loop.add(first)
    while not loop.is_idle:
        loop.step()
        held = max(held, loop.stats()["num_blocks_held"])
    requests = [each for group in groups for each in group]
    assert all(each.token_ids == list(range(1000 + each.sampling.max_new_tokens)) for each in requests)
    num_decoded = sum(each.sampling.max_new_tokens - 1 for each in requests)
    return sum(tokens for rows in loop.executor.batches for _, tokens in rows) - num_decoded, held


def test_eight_answers_to_a_prompt_of_1000_tokens_cost_one_prefill_and_the_blocks_of_one_prompt():
    requests, others = ([a_request(range(1000), 24, str(n)) for n in range(8)] for _ in range(2))
    assert cost_of(requests) == (1000, 15 + 8)  # 15 full blocks are shared, the last one is copied
    assert cost_of(*[[each] for each in others]) == (8000, 8 * 16)


@pytest.mark.parametrize("num_blocks", [5, 7, 40])
def test_32_requests_together_get_the_tokens_that_each_gets_alone(num_blocks):
    loop = a_loop(num_blocks=num_blocks, batch_size=8, max_num_batched_tokens=16, block_ratio=0.9)
    requests = [a_request([n % 5] * (1 + n % 7), 1 + n % 11, str(n)) for n in range(32)]
    for request in requests:
        loop.add(request)
    while not loop.is_idle:
        loop.step()
    for request in requests:
        prompt = request.token_ids[: request.prompt_len]
        assert request.token_ids == prompt + answer(prompt, request.sampling)
    assert (loop.stats()["num_preemptions"] > 0) == (num_blocks < 40)
