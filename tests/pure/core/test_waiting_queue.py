"""The waiting queue: first come, first served, with priorities that age and equal shares between owners."""

import random

from engine.core.types import Request, Sampling
from engine.core.waiting_queue import LEVEL_TOKENS, WaitingQueue


def a_request(name, owner="", priority=0, prompt_len=10, max_new_tokens=90):
    # Its cost is 100 tokens by default.
    return Request(name, [0] * prompt_len, prompt_len, Sampling(max_new_tokens), owner=owner, priority=priority)


def add(waiting, *requests):
    for request in requests:
        waiting.add(request)


def begin(waiting, count=None):
    """Return the names of the requests in the order of their start."""
    names = []
    while len(waiting) and len(names) != count:
        [request] = waiting.first(1)
        waiting.begin(request)
        names.append(request.request_id)
    return names


def test_requests_of_one_owner_begin_in_the_order_of_their_arrival_whatever_they_cost():
    waiting, rng = WaitingQueue(), random.Random(0)
    names = [str(index) for index in range(50)]
    add(
        waiting,
        *[a_request(name, prompt_len=rng.randint(1, 999), max_new_tokens=rng.randint(1, 999)) for name in names],
    )
    assert [request.request_id for request in waiting] == begin(waiting) == names


def test_a_lower_priority_number_begins_earlier():
    waiting = WaitingQueue()
    add(
        waiting, a_request("usual"), a_request("batch", priority=3), a_request("urgent", priority=-1), a_request("next")
    )
    assert begin(waiting) == ["urgent", "usual", "next", "batch"]


def test_a_request_of_low_priority_is_overtaken_by_so_many_tokens_and_no_more():
    waiting = WaitingQueue()
    add(waiting, a_request("low", priority=1))
    num_overtaking = 0
    while True:
        add(waiting, a_request(f"high {num_overtaking}", max_new_tokens=1014))
        [name] = begin(waiting, 1)
        if name == "low":
            break
        num_overtaking += 1
    assert num_overtaking == LEVEL_TOKENS // 1024


def test_owners_take_turns_however_many_requests_one_of_them_has():
    waiting = WaitingQueue()
    add(waiting, *[a_request(f"a{index}", "a") for index in range(100)])
    assert begin(waiting, 10) == [f"a{index}" for index in range(10)]
    add(waiting, *[a_request(f"b{index}", "b") for index in range(5)])
    names = begin(waiting, 10)
    assert [name for name in names if name[0] == "b"] == [f"b{index}" for index in range(5)]
    assert [name for name in names if name[0] == "a"] == [f"a{index}" for index in range(10, 15)]


def test_equal_shares_are_of_tokens():
    waiting = WaitingQueue()
    add(waiting, *[a_request(f"long {index}", "a", max_new_tokens=290) for index in range(20)])
    add(waiting, *[a_request(f"short {index}", "b") for index in range(60)])
    assert sum(name.startswith("short") for name in begin(waiting, 40)) in (29, 30, 31)


def test_an_owner_without_requests_for_long_has_saved_up_nothing():
    waiting = WaitingQueue()
    add(waiting, *[a_request(f"a{index}", "a") for index in range(40)])
    begin(waiting, 20)
    add(waiting, *[a_request(f"b{index}", "b") for index in range(20)])
    assert "a20" in begin(waiting, 3)


def test_cancelled_requests_are_not_charged():
    waiting = WaitingQueue()
    add(waiting, *[a_request(f"b{index}", "b") for index in range(3)])
    add(waiting, *[a_request(f"a{index}", "a") for index in range(50)])
    assert all(waiting.drop(f"a{index}") for index in range(50))
    assert not waiting.drop("a0")
    add(waiting, a_request("again", "a"))
    assert "again" in begin(waiting, 2)


def test_preempted_requests_come_before_all_others():
    waiting = WaitingQueue()
    add(waiting, a_request("urgent", priority=-9), a_request("usual"))
    waiting.put_back(a_request("older", priority=5))
    waiting.put_back(a_request("younger", priority=5))
    assert begin(waiting) == ["younger", "older", "urgent", "usual"]


def test_the_tokens_of_the_prompts_are_counted():
    waiting = WaitingQueue()
    add(waiting, a_request("a", prompt_len=5), a_request("b", prompt_len=7))
    assert waiting.num_tokens == 12
    waiting.drop("a")
    waiting.put_back(a_request("c", prompt_len=1))
    assert (waiting.num_tokens, waiting.get("a"), waiting.get("b").prompt_len) == (8, None, 7)
    begin(waiting)
    assert waiting.num_tokens == 0
