"""The scheduler selects requests and tokens for steps; every answer is the one computed by hand, in any schedule."""

import pytest

from engine.core.block_pool import BlockPool
from engine.core.limits import Limits, PrefillLimits
from engine.core.scheduler import Scheduler
from engine.core.types import NO_TOKEN, PENDING, Request, Sampling, StepOutput
from engine.core.updates import FAILED
from engine.errors import InvalidRequest, Overloaded
from tests.pure.counting_executor import CountingExecutor, answer


def a_scheduler(num_blocks=16, block_size=4, max_batch=4, caching=True, **limits):
    limits = {"max_batched_tokens": 16, "block_ratio": 0.75, **limits}
    return Scheduler(BlockPool(num_blocks, block_size, caching), Limits(max_batch=max_batch, **limits))


def a_request(prompt, max_new_tokens=4, request_id="", **sampling):
    return Request(
        request_id or str(prompt[0]), list(prompt), len(prompt), Sampling(max_new_tokens, temperature=0, **sampling)
    )


def an_executor(scheduler):
    return CountingExecutor(scheduler.pool.num_blocks, scheduler.pool.block_size)


def step(scheduler, executor):
    batch = scheduler.next_batch()
    updates = scheduler.apply(executor.launch(batch).result())
    scheduler.check()
    return updates


def run(scheduler, executor=None):
    """Run until no request is left. Return how each request ended, in this order."""
    executor = executor or an_executor(scheduler)
    ends = []
    while not scheduler.is_idle:
        ends += [(u.request.request_id, u.finish_reason) for u in step(scheduler, executor) if u.finish_reason]
    assert scheduler.next_batch() is None
    return ends


def fill(num_tokens, first):
    return list(range(first, first + num_tokens))


def test_a_late_request_joins_the_running_ones():
    scheduler = a_scheduler()
    executor = an_executor(scheduler)
    early, late = a_request([5, 6], 4), a_request([10], 2)
    scheduler.add(early)
    step(scheduler, executor)
    step(scheduler, executor)
    scheduler.add(late)
    run(scheduler, executor)
    assert early.token_ids == [5, 6, 7, 8, 9, 10]
    assert late.token_ids == [10, 11, 12]
    assert executor.batches == [[("5", 2)], [("5", 1)], [("5", 1), ("10", 1)], [("5", 1), ("10", 1)]]


def test_a_long_prompt_is_cut_into_chunks_beside_the_decodes():
    scheduler = a_scheduler(max_batched_tokens=6)
    executor = an_executor(scheduler)
    scheduler.add(a_request([1, 2], 5))
    step(scheduler, executor)
    scheduler.add(a_request(fill(13, 100), 1))
    run(scheduler, executor)
    assert executor.batches[1:] == [[("1", 1), ("100", 5)], [("1", 1), ("100", 5)], [("1", 1), ("100", 3)], [("1", 1)]]


def test_a_prompt_that_has_begun_goes_before_one_that_waits():
    scheduler = a_scheduler(max_batched_tokens=6)
    executor = an_executor(scheduler)
    for first in (100, 200):
        scheduler.add(a_request(fill(8, first), 1))
    run(scheduler, executor)
    assert executor.batches == [[("100", 6)], [("100", 2), ("200", 4)], [("200", 4)]]


def prefills(max_prefills, max_long, long_tokens=8):
    return PrefillLimits(max_prefills, max_long, long_tokens)


def test_a_short_prompt_is_done_at_once_beside_a_long_one():
    scheduler = a_scheduler(max_batched_tokens=8, prefills=prefills(2, 1))
    executor = an_executor(scheduler)
    for prompt in (fill(20, 100), [10, 11, 12], [20, 21]):
        scheduler.add(a_request(prompt, 1))
    run(scheduler, executor)
    assert executor.batches == [[("10", 3), ("100", 5)], [("20", 2), ("100", 6)], [("100", 8)], [("100", 1)]]


def test_prompts_of_a_step_have_equal_shares_and_no_more_begin_than_the_limit_says():
    scheduler = a_scheduler(max_batched_tokens=8, prefills=prefills(2, 2))
    executor = an_executor(scheduler)
    for first in (100, 200, 300):
        scheduler.add(a_request(fill(9, first), 1))
    run(scheduler, executor)
    assert executor.batches == [
        [("100", 4), ("200", 4)],
        [("100", 4), ("200", 4)],
        [("100", 1), ("200", 1)],
        [("300", 8)],
        [("300", 1)],
    ]


def test_long_prompts_wait_for_their_limit_while_short_ones_go_before_them():
    scheduler = a_scheduler(num_blocks=64, max_batch=8, max_batched_tokens=16, prefills=prefills(3, 1))
    executor = an_executor(scheduler)
    for first in (100, 200, 300, 400, 500, 600):
        scheduler.add(a_request(fill(16, first), 1))
    scheduler.add(a_request([10], 1))
    assert run(scheduler, executor)[:3] == [("10", "length"), ("100", "length"), ("200", "length")]
    assert executor.batches[:3] == [[("10", 1), ("100", 15)], [("100", 1)], [("200", 16)]]


def test_one_prompt_at_a_time_is_what_a_limit_of_one_means():
    scheduler = a_scheduler(prefills=prefills(1, 1))
    executor = an_executor(scheduler)
    for first in (10, 20):
        scheduler.add(a_request([first], 2))
    run(scheduler, executor)
    assert executor.batches == [[("10", 1)], [("10", 1), ("20", 1)], [("20", 1)]]


def test_an_answer_ends_with_its_stop_id_or_its_length():
    scheduler = a_scheduler()
    scheduler.add(a_request([5], 9, stop_token_ids=(8,)))
    scheduler.add(a_request([20], 3, stop_token_ids=(8,)))
    scheduler.add(a_request([30], 1))
    assert run(scheduler) == [("30", "length"), ("5", "stop"), ("20", "length")]


def test_a_stop_id_in_the_last_place_is_a_stop():
    scheduler = a_scheduler()
    scheduler.add(a_request([5], 3, stop_token_ids=(8,)))
    assert run(scheduler) == [("5", "stop")]


@pytest.mark.parametrize(
    ("min_new_tokens", "expected"),
    [(0, [6]), (1, [7, 8, 9]), (2, [7, 8, 9]), (3, [7, 8, 10, 11, 12])],
)
def test_a_stop_id_counts_only_after_the_least_length(min_new_tokens, expected):
    request = a_request([5], 5, min_new_tokens=min_new_tokens, stop_token_ids=(6, 9))
    scheduler = a_scheduler()
    scheduler.add(request)
    run(scheduler)
    assert request.token_ids[1:] == expected


def test_the_first_steps_take_no_more_requests_than_fit_the_batch():
    scheduler = a_scheduler(max_batch=2)
    executor = an_executor(scheduler)
    for first in (10, 20, 30):
        scheduler.add(a_request([first], 2))
    run(scheduler, executor)
    assert executor.batches == [[("10", 1), ("20", 1)], [("10", 1), ("20", 1)], [("30", 1)], [("30", 1)]]


def test_a_request_that_could_never_fit_is_refused_with_the_numbers():
    scheduler = a_scheduler(num_blocks=3, block_size=4)
    with pytest.raises(
        InvalidRequest, match=r"prompt \(9 tokens\) and answer \(up to 5\) need 4 KV blocks of 4"
    ) as raised:
        scheduler.add(a_request(fill(9, 1), 5))
    assert raised.value.cause == {"field": "max_dec_len", "value": 5}
    with pytest.raises(InvalidRequest, match="up to 1") as raised:
        scheduler.add(a_request(fill(13, 1), 1))
    assert raised.value.field is None  # no length of the answer would help
    scheduler.add(a_request(fill(9, 1), 4))  # the last token needs no place
    assert run(scheduler) == [("1", "length")]


def test_too_many_waiting_requests_are_refused_but_never_a_replay():
    scheduler = a_scheduler(max_batch=2, max_waiting=3)
    for first in range(10, 15):
        scheduler.add(a_request([first]))
    with pytest.raises(Overloaded, match=r"3 requests are waiting, at most MAX_CACHED_TASK_NUM\(3\) may"):
        scheduler.add(a_request([15]))
    scheduler.add(a_request([15]), replay=True)
    assert len(run(scheduler)) == 6


def test_too_many_waiting_tokens_are_refused_but_one_request_may_always_wait():
    scheduler = a_scheduler(max_batch=2, max_waiting_tokens=20)
    scheduler.add(a_request(fill(21, 100)))
    with pytest.raises(Overloaded, match=r"21 tokens of prompts are waiting, at most MAX_WAITING_TOKENS\(20\) may"):
        scheduler.add(a_request([15]))
    scheduler.add(a_request([15]), replay=True)
    step(scheduler, an_executor(scheduler))
    scheduler.add(a_request([16]))  # the long one has begun
    assert scheduler.waiting.num_tokens == 2


def test_answers_that_do_not_fit_beside_the_others_wait_like_requests():
    scheduler = a_scheduler(num_blocks=16, block_size=4, max_batch=2)
    executor = an_executor(scheduler)
    first, *forks = (a_request(fill(8, 50), 2, request_id=str(index)) for index in range(5))
    first.forks = forks
    scheduler.add(first)
    assert [each.request_id for each in scheduler.waiting] == ["0", "2", "3", "4"]
    scheduler.drop("3")
    assert sorted(run(scheduler, executor)) == [(name, "length") for name in "0124"]
    assert all(each.token_ids[8:] == [58, 59] for each in (first, *forks) if each.request_id != "3")
    assert executor.batches[0] == [("50", 8)]
    assert executor.batches[2] == [("50", 4), ("50", 4)]  # the first block of the prompt is in the cache


def test_answers_that_the_cache_cannot_hold_together_wait_for_each_other():
    scheduler = a_scheduler(num_blocks=4, block_size=4, max_batch=4)
    first, *forks = (a_request([5], 13, request_id=str(index)) for index in range(3))
    first.forks = forks
    scheduler.add(first)
    assert sorted(run(scheduler)) == [(name, "length") for name in "012"]


def test_requests_that_can_start_at_once_do_not_count_as_waiting_ones():
    scheduler = a_scheduler(max_batch=2, max_waiting=1)
    scheduler.add(a_request([10]))
    step(scheduler, an_executor(scheduler))
    scheduler.add(a_request([11]))  # beside the running one
    scheduler.add(a_request([12]))
    with pytest.raises(Overloaded, match=r"1 requests are waiting"):
        scheduler.add(a_request([13]))


def test_a_replayed_request_goes_on_where_it_was():
    for temperature in (0.0, 1.0):
        sampling = Sampling(9, temperature=temperature, seed=3)
        whole = answer([5, 6], sampling)
        request = Request("a", [5, 6, *whole[:4]], 2, sampling)
        scheduler = a_scheduler()
        scheduler.add(request, replay=True)
        assert run(scheduler) == [("a", "length")]
        assert request.token_ids == [5, 6, *whole]


def test_a_dropped_request_leaves_no_blocks_wherever_it_was():
    scheduler = a_scheduler(max_batch=1, max_batched_tokens=2)
    executor = an_executor(scheduler)
    running, waiting = a_request(fill(5, 10)), a_request([20])
    scheduler.add(running)
    scheduler.add(waiting)
    step(scheduler, executor)
    assert scheduler.pool.num_held == 2
    assert scheduler.drop("20") is waiting
    assert scheduler.drop("10") is running
    assert scheduler.drop("10") is None
    scheduler.check()
    assert (scheduler.is_idle, scheduler.pool.num_held) == (True, 0)


def test_the_youngest_is_preempted_and_waits_at_the_head():
    scheduler = a_scheduler(num_blocks=3, block_size=2, block_ratio=0.99, caching=False)
    executor = an_executor(scheduler)
    old, young, waiting = a_request([10], 5), a_request([20], 5), a_request([30], 1)
    for request in (old, young, waiting):
        scheduler.add(request)
    while not scheduler.counters.num_preemptions:
        step(scheduler, executor)
    assert list(scheduler.waiting) == [young, waiting]
    assert list(scheduler.running.values()) == [old]
    run(scheduler, executor)
    assert young.token_ids == [20, 21, 22, 23, 24, 25]
    assert [request.num_preemptions for request in (old, young, waiting)] == [0, 1, 0]


def test_one_long_request_may_take_every_block():
    scheduler = a_scheduler(num_blocks=4, block_size=4, block_ratio=0.25)
    scheduler.add(a_request(fill(13, 1), 4))
    assert run(scheduler) == [("1", "length")]


def test_prompts_leave_room_to_grow():
    scheduler = a_scheduler(num_blocks=8, block_size=4, block_ratio=0.5)
    for first in (100, 200, 300):
        scheduler.add(a_request(fill(8, first), 2))
    scheduler.next_batch()
    assert list(scheduler.running) == ["100", "200"]


def test_blocks_that_are_cached_count_when_they_are_taken():
    scheduler = a_scheduler(num_blocks=8, block_size=4, block_ratio=0.5)
    for first in (100, 200):
        scheduler.add(a_request(fill(9, first), 1))
    run(scheduler)
    for first in (100, 200):  # each takes three blocks, two of them cached
        scheduler.add(a_request(fill(9, first), 1))
    scheduler.next_batch()
    assert list(scheduler.running) == ["100"]


def test_blocks_that_another_request_holds_cost_nothing():
    scheduler = a_scheduler(num_blocks=8, block_size=4, block_ratio=0.5)
    executor = an_executor(scheduler)
    scheduler.add(a_request(fill(9, 100), 3))
    step(scheduler, executor)
    scheduler.add(a_request(fill(9, 100), 3, request_id="same"))
    step(scheduler, executor)
    assert (len(scheduler.running), scheduler.pool.num_held) == (2, 4)
    run(scheduler, executor)


def test_with_the_worst_case_reserved_a_request_waits_instead_of_being_preempted():
    scheduler = a_scheduler(num_blocks=5, block_size=2, block_ratio=1)
    executor = an_executor(scheduler)
    for first in (10, 20):
        scheduler.add(a_request([first], 5))  # three blocks each, in the end
    step(scheduler, executor)
    assert list(scheduler.running) == ["10"]
    assert run(scheduler, executor) == [("10", "length"), ("20", "length")]
    assert scheduler.counters.num_preemptions == 0


def test_a_prompt_that_begins_alike_computes_only_what_is_new():
    scheduler = a_scheduler(max_batched_tokens=32)
    executor = an_executor(scheduler)
    scheduler.add(a_request(fill(10, 100), 3, request_id="cold"))
    run(scheduler, executor)
    executor.batches.clear()
    scheduler.add(a_request(fill(14, 100), 1, request_id="warm"))  # 12 tokens of prompt and answer are in full blocks
    run(scheduler, executor)
    assert executor.batches == [[("100", 2)]]
    assert (scheduler.counters.num_prompt_tokens, scheduler.counters.num_cached_tokens) == (24, 12)


def test_a_preempted_request_finds_its_blocks_on_the_host():
    """The cache has all full blocks after a preemption with SWAP_SPACE, and none without it."""
    found = {}
    for num_host_blocks in (0, 8):
        pool = BlockPool(6, 4, num_host_blocks=num_host_blocks)
        scheduler = Scheduler(pool, Limits(max_batch=4, max_batched_tokens=16, block_ratio=0.99))
        executor = an_executor(scheduler)
        old, young = a_request(fill(8, 10), 14), a_request(fill(9, 100), 6)
        for request in (old, young):
            scheduler.add(request)
        while not scheduler.is_idle:
            step(scheduler, executor)
        assert (old.token_ids, young.token_ids) == (fill(22, 10), fill(15, 100))
        assert (old.num_preemptions, young.num_preemptions) == (0, 1)
        found[num_host_blocks] = young.num_cached
    assert found == {0: 0, 8: 12}


def test_swapping_in_counts_against_the_budget_of_a_step():
    pool = BlockPool(48, 4, num_host_blocks=100)
    scheduler = Scheduler(pool, Limits(max_batch=12, max_batched_tokens=12, block_ratio=0.99))
    executor, num_swap_ins = an_executor(scheduler), []
    for turn in range(2):
        for first in range(0, 12_000, 1000):
            scheduler.add(a_request(fill(16 + turn, first), 1))
            if turn == 0:
                run(scheduler, executor)
        if turn == 0:  # everything is pushed out
            scheduler.add(a_request(fill(192, 50_000), 1))
            run(scheduler, executor)
    while batch := scheduler.next_batch():
        num_swap_ins.append(len(batch.swaps.ins))
        scheduler.apply(executor.launch(batch).result())
    # Each brings 16 tokens, which count as two, and computes one.
    assert num_swap_ins == [4 * 4] * 3


def test_a_preempted_request_does_not_count_as_cached():
    scheduler = a_scheduler(num_blocks=4, block_size=2, block_ratio=0.99)
    for first in (10, 20):
        scheduler.add(a_request([first, first + 1], 5))
    run(scheduler)
    assert scheduler.counters.num_preemptions > 0
    assert (scheduler.counters.num_prompt_tokens, scheduler.counters.num_cached_tokens) == (4, 0)


def test_a_budget_below_the_batch_is_a_bug():
    with pytest.raises(AssertionError):
        a_scheduler(max_batch=4, max_batched_tokens=3)


# --- a step that is picked while the one before runs


def launch_ahead(scheduler, executor):
    """Return the outputs of the two steps."""
    first = executor.launch(scheduler.next_batch()).result()
    assert scheduler.may_run_ahead()
    return first, executor.launch(scheduler.next_batch()).result()


def test_the_tokens_of_a_step_ahead_are_pending_and_those_beyond_the_end_are_left_out():
    scheduler = a_scheduler()
    executor = an_executor(scheduler)
    short, long = a_request([5], 1), a_request([10], 3)
    scheduler.add(short)
    scheduler.add(long)
    executor.launch(scheduler.next_batch())
    assert [(row.start, row.token_ids) for row in scheduler.next_batch().rows] == [(1, [PENDING])]


def test_a_step_ahead_admits_no_request_that_needs_the_last_token():
    scheduler = a_scheduler(max_batch=8, max_batched_tokens=8)
    executor = an_executor(scheduler)
    scheduler.add(a_request([10], 9))
    first = executor.launch(scheduler.next_batch()).result()
    for number in range(20, 60, 10):
        scheduler.add(a_request([number], 9))
    scheduler.add(a_request([60], 9, frequency_penalty=1.0))
    assert scheduler.may_run_ahead()  # the first ones that wait could go
    second = executor.launch(scheduler.next_batch()).result()
    assert sorted(scheduler.running) == ["10", "20", "30", "40", "50"]
    scheduler.apply(first)
    assert not scheduler.may_run_ahead()
    scheduler.apply(second)
    assert len(scheduler.next_batch().rows) == 6


def test_nothing_is_scheduled_ahead_if_a_request_would_be_preempted():
    scheduler = a_scheduler(num_blocks=3, block_ratio=0.9)
    executor = an_executor(scheduler)
    scheduler.add(a_request([10, 11, 12], 9))
    scheduler.add(a_request([20, 21, 22], 9))
    outputs = launch_ahead(scheduler, executor)
    scheduler.apply(outputs[0])
    assert scheduler.pool.num_available == 1  # both need one for their next token
    assert not scheduler.may_run_ahead()


def test_a_step_ahead_has_room_for_the_drafts_of_both_steps():
    """Wherever the first one ends: with one token, or with all drafts that it may have."""
    scheduler = Scheduler(BlockPool(16, 4), Limits(4, 16, max_drafts=3))
    request = a_request([10], 20)
    scheduler.add(request)
    scheduler.next_batch()
    scheduler.apply(StepOutput([[11]], [None]))
    for start, end in ((1, 5), (2, 9)):
        [row] = scheduler.next_batch().rows
        assert (row.start, row.max_drafts, request.cache.num_writable >= end) == (start, 3, True)
    assert (request.num_computed, request.num_unverified) == (3, 6)
    scheduler.apply(StepOutput([[12, 13, 14]], [None], num_drafts=3))
    assert (request.num_computed, request.num_unverified) == (5, 3)
    scheduler.apply(StepOutput([[15]], [None], num_drafts=1))
    assert (request.num_computed, request.num_unverified) == (5, 0)
    assert request.token_ids == [10, *range(11, 16)]
    assert (scheduler.counters.num_drafted_tokens, scheduler.counters.num_accepted_tokens) == (4, 2)


def test_prompts_take_the_tokens_of_a_step_before_drafts_do():
    scheduler = Scheduler(BlockPool(16, 4), Limits(4, 8, max_drafts=3))
    scheduler.add(a_request([10], 20))
    assert scheduler.next_batch().max_drafts == 7
    scheduler.apply(StepOutput([[11]], [None]))
    scheduler.add(a_request(range(20, 25), 20))
    batch = scheduler.next_batch()
    assert ([row.max_drafts for row in batch.rows], batch.max_drafts) == ([3, 0], 2)


def test_no_drafts_are_asked_for_beyond_the_end():
    scheduler = Scheduler(BlockPool(16, 4), Limits(4, 16, max_drafts=3))
    scheduler.add(a_request([10], 4))
    scheduler.next_batch()
    scheduler.apply(StepOutput([[11]], [None]))
    assert [scheduler.next_batch().rows[0].max_drafts for _ in range(2)] == [2, 1]


@pytest.mark.parametrize(
    ("token_ids", "stop_token_ids", "expected"),
    [
        ([NO_TOKEN], (), (FAILED, [])),
        ([12, NO_TOKEN], (), (FAILED, [])),  # every token that could follow an accepted draft is banned
        ([12, NO_TOKEN], (12,), ("stop", [12])),
    ],
)
def test_a_request_fails_where_no_token_can_be_sampled_also_behind_accepted_drafts(token_ids, stop_token_ids, expected):
    scheduler = Scheduler(BlockPool(16, 4), Limits(4, 16, max_drafts=3))
    scheduler.add(a_request([10], 20, stop_token_ids=stop_token_ids))
    scheduler.next_batch()
    scheduler.apply(StepOutput([[11]], [None]))
    scheduler.next_batch()
    [update] = scheduler.apply(StepOutput([token_ids], [None], num_drafts=3))
    assert (update.finish_reason, list(update.token_ids)) == expected
    assert scheduler.is_idle


@pytest.mark.parametrize(("bad_words", "expected"), [((), None), (((7,),), ("invalid_request", "bad_words"))])
def test_a_request_whose_bans_leave_no_token_is_to_blame_itself(bad_words, expected):
    scheduler = a_scheduler()
    scheduler.add(a_request([10], bad_words=bad_words))
    scheduler.next_batch()
    [update] = scheduler.apply(StepOutput([[NO_TOKEN]], [None]))
    assert update.finish_reason == FAILED
    assert (update.error and (update.error.kind, update.error.field)) == expected
