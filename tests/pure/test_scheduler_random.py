"""Random arrivals, lengths, cancellations and pools: each answer is the one computed by hand, and everybody gets on."""

import random
from dataclasses import dataclass, field

import pytest

from engine.core.block_pool import BlockPool
from engine.core.scheduler import Limits, Scheduler
from engine.core.types import Request, Sampling
from tests.pure.counting_executor import CountingExecutor, answer

NUM_REQUESTS = 24


@dataclass
class World:
    """A scheduler with limits drawn from a seed, and all that has happened to its requests."""

    rng: random.Random
    block_ratio: float
    caching: bool
    requests: dict[str, Request] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    next_start: dict[tuple[str, int], int] = field(default_factory=dict)  # by request and number of preemptions

    def __post_init__(self):
        rng = self.rng
        self.block_size = rng.choice([1, 2, 4, 8])
        self.num_blocks = rng.randint(6, 40)
        max_batch = rng.randint(1, 6)
        self.limits = Limits(max_batch, max_batch + rng.randrange(12), self.block_ratio, NUM_REQUESTS)
        self.scheduler = Scheduler(BlockPool(self.num_blocks, self.block_size, self.caching), self.limits)
        self.executor = CountingExecutor(self.num_blocks, self.block_size)

    def add(self):
        """A request that just fits at most; half of them begin alike, some have been begun before a crash."""
        rng, room = self.rng, self.num_blocks * self.block_size
        prompt_len = rng.randint(1, min(room, 40))
        start = 0 if rng.random() < 0.5 else rng.randrange(10**6)
        prompt = [start + index // 3 for index in range(prompt_len)]
        sampling = Sampling(
            max_new_tokens=rng.randint(1, min(room - prompt_len + 1, 30)),
            min_new_tokens=rng.choice([0, 0, 3]),
            temperature=rng.choice([0.0, 0.8]),
            seed=rng.randrange(3),
            stop_token_ids=(prompt[-1] + rng.randint(1, 40), rng.randrange(1009)),
        )
        whole = answer(prompt, sampling)
        begun = whole[: rng.randrange(len(whole))] if rng.random() < 0.2 else []
        request = Request(str(len(self.requests)), prompt + begun, prompt_len, sampling)
        self.requests[request.request_id] = request
        self.scheduler.add(request, replay=bool(begun))

    def drop_one(self):
        open_ids = [r.request_id for r in (*self.scheduler.waiting, *self.scheduler.running)]
        if open_ids:
            self.dropped.append(self.rng.choice(open_ids))
            assert self.scheduler.drop(self.dropped[-1]) is self.requests[self.dropped[-1]]
            self.scheduler.check()

    def step(self):
        scheduler = self.scheduler
        batch = scheduler.next_batch()
        if batch is None:
            assert scheduler.is_idle
            return
        self.check_batch(batch)
        oldest = scheduler.running[0]
        before = oldest.num_computed
        for update in scheduler.apply(batch, self.executor.step(batch)):
            assert self.requests[update.request.request_id] is update.request
            if update.finish_reason:
                self.ended.append(update.request.request_id)
        assert oldest.num_computed > before or oldest not in scheduler.running, "the oldest request did not get on"
        scheduler.check()

    def check_batch(self, batch):
        assert 0 < batch.num_tokens <= self.limits.max_batched_tokens
        assert len(batch.chunks) <= len(self.scheduler.running) <= self.limits.max_batch
        assert len({chunk.request for chunk in batch.chunks}) == len(batch.chunks)
        for chunk in batch.chunks:
            request = chunk.request
            admission = request.request_id, request.num_preemptions
            assert chunk.start == self.next_start.get(admission, request.num_cached), "a position is missing or twice"
            assert 0 < chunk.end <= len(request.token_ids)
            self.next_start[admission] = chunk.end

    def check_end(self):
        assert self.scheduler.is_idle
        assert self.scheduler.pool.num_held == 0
        assert sorted(self.ended + self.dropped) == sorted(self.requests)
        for request_id in self.ended:
            request = self.requests[request_id]
            prompt, tokens = request.token_ids[: request.prompt_len], request.token_ids[request.prompt_len :]
            assert tokens == answer(prompt, request.sampling)
            is_stop = tokens[-1] in request.sampling.stop_token_ids and len(tokens) > request.sampling.min_new_tokens
            assert request.finish_reason == ("stop" if is_stop else "length")


def live(world, drops):
    while len(world.requests) < NUM_REQUESTS or not world.scheduler.is_idle:
        if len(world.requests) < NUM_REQUESTS and world.rng.random() < 0.4:
            world.add()
        if world.rng.random() < drops:
            world.drop_one()
        world.step()
    world.check_end()


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("block_ratio", [0.01, 0.3, 0.75, 0.99, 1, 2])
def test_every_request_ends_once_with_its_own_tokens(block_ratio, caching):
    num_preemptions = num_cached = 0
    for seed in range(40):
        world = World(random.Random(seed), block_ratio, caching)
        live(world, drops=0.05 if seed % 2 else 0)
        num_preemptions += world.scheduler.num_preemptions
        num_cached += world.scheduler.num_cached_tokens
    # With the worst case reserved nobody gives way, nor with one request at a time; else it must have been met.
    assert (num_preemptions > 0) == (0.01 < block_ratio < 1)
    assert (num_cached > 0) == caching


def test_nobody_starves_behind_requests_that_arrive_for_ever():
    scheduler = Scheduler(BlockPool(8, 4), Limits(max_batch=3, max_batched_tokens=6, max_waiting=10))
    executor, rng = CountingExecutor(8, 4), random.Random(0)
    big = Request("big", list(range(100, 125)), 25, Sampling(8, temperature=0))  # every block of the pool
    for number in range(300):
        if number == 20:
            scheduler.add(big)
        if len(scheduler.waiting) < 5:
            first = rng.randrange(10**6)
            scheduler.add(Request(str(number), [first, first + 1], 2, Sampling(rng.randint(1, 12), temperature=0)))
        batch = scheduler.next_batch()
        scheduler.apply(batch, executor.step(batch))
    assert big.finish_reason == "length"
