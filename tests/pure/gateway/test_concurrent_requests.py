"""The requests of one exchange, beside a model that has room for some of them."""

import asyncio
import contextlib
from functools import partial

import pytest

from engine.errors import EngineUnavailable, Overloaded, queue_full
from engine.settings.config import Config
from engine.wire import Delta, Usage
from gateway import concurrent_requests
from gateway.concurrent_requests import max_concurrent_requests, run_concurrently

TIMEOUT_S, AT_ONCE = 60.0, 128


class Model:
    """Takes `room` requests at once, and answers each with one Delta."""

    def __init__(self, room):
        self.room = room
        self.num_open = self.most_open = self.num_asked = self.num_refused = 0

    async def answer(self, index):
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.num_open >= self.room:
            self.num_refused += 1
            raise queue_full(self.num_open, self.room)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            yield a_delta(index)
        finally:
            self.num_open -= 1


def a_delta(index):
    return Delta(f"{index}", "a", [index], 0, Usage(1, 1), infer_seed=1)


async def exchange(model, num, timeout_s=TIMEOUT_S):
    """Return the indices of the requests that were answered."""
    answers = run_concurrently([partial(model.answer, index) for index in range(num)], AT_ONCE, timeout_s)
    async with contextlib.aclosing(answers):
        return [index async for index, answer in answers if answer.req_id == str(index)]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(concurrent_requests, "RETRY_AFTER_S", 0.001)


@pytest.mark.parametrize("room", [1, 3, 100, 1000])
def test_every_request_of_an_exchange_is_answered_once_however_few_the_model_takes_at_once(room):
    model = Model(room)
    assert sorted(asyncio.run(exchange(model, 300))) == [*range(300)]
    assert model.num_open == 0
    assert model.most_open == min(room, AT_ONCE)
    assert model.num_refused < AT_ONCE + 300


def test_exchanges_that_fill_the_model_together_are_all_answered():
    model = Model(140)

    async def several():
        return await asyncio.gather(*[exchange(model, 300) for _ in range(2)])

    assert [sorted(each) for each in asyncio.run(several())] == [[*range(300)]] * 2


def test_exchanges_that_have_filled_the_model_leave_room_for_who_has_one_request():
    model = Model(150)
    refused = []

    async def alone():
        for index in range(100):
            await asyncio.sleep(0.001)
            try:
                await exchange(model, 1)
            except Overloaded:
                refused.append(index)

    async def several():
        await asyncio.gather(exchange(model, 3000), exchange(model, 3000), alone())

    asyncio.run(several())
    assert len(refused) < 20


def test_an_exchange_of_which_the_model_takes_nothing_is_refused_and_asks_for_nothing_again():
    model = Model(0)
    with pytest.raises(Overloaded):
        asyncio.run(exchange(model, 300))
    assert model.num_asked == AT_ONCE


def test_one_that_has_answers_waits_until_others_make_room_and_gives_up_after_its_timeout(monkeypatch):
    model = Model(2)

    async def crowded_out(timeout_s, until):
        answers = run_concurrently([partial(model.answer, index) for index in range(4)], AT_ONCE, timeout_s)
        async with contextlib.aclosing(answers):
            reported = [(await anext(answers))[0]]
            model.room = 0
            asyncio.get_running_loop().call_later(until, setattr, model, "room", 1)
            return sorted([*reported, *[index async for index, _ in answers]])

    assert asyncio.run(crowded_out(TIMEOUT_S, 0.05)) == [0, 1, 2, 3]
    model.room = 2
    with pytest.raises(Overloaded):
        asyncio.run(crowded_out(0.05, TIMEOUT_S))


def test_a_request_that_waits_for_the_tokens_of_its_api_key_ends_when_the_gateway_stops():
    refused = queue_full(1, 1)
    refused.retry_after_s = 60

    async def answer(index, asked):
        await asyncio.sleep(0)
        asked.append(index)
        if len(asked) == 5:
            raise EngineUnavailable("the gateway is stopping")
        if index > 0:
            raise refused
        yield a_delta(index)

    async def stopped():
        asked = []
        asks = [partial(answer, index, asked) for index in range(2)]
        with pytest.raises(EngineUnavailable, match="is stopping"):
            async for _ in run_concurrently(asks, AT_ONCE, TIMEOUT_S):
                pass

    asyncio.run(asyncio.wait_for(stopped(), 20))


def test_an_exchange_that_is_left_while_it_waits_asks_for_nothing_more():
    model = Model(1)

    async def left():
        task = asyncio.create_task(exchange(model, 300))
        while model.num_refused < 3:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        num_asked = model.num_asked
        await asyncio.sleep(0.05)
        return model.num_asked - num_asked

    assert asyncio.run(left()) == 0
    assert model.num_open == 0


def test_an_exchange_leaves_half_of_the_queue_to_others():
    assert max_concurrent_requests(Config(batch_size=200)) == AT_ONCE
    assert max_concurrent_requests(Config(batch_size=8, max_cached_task_num=128)) == 72
    assert max_concurrent_requests(Config(batch_size=1, max_cached_task_num=0)) == 1
