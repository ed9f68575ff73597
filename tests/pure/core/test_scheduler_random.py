"""Random arrivals, lengths, cancellations and pools: each answer is the one computed by hand, and everybody gets on."""

import random
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from engine.core import kv_cache_manager
from engine.core.block_pool import BlockPool
from engine.core.cache_groups import FULL_ATTENTION, PAGED, SLIDING_WINDOW, STATE, CacheGroup
from engine.core.limits import Limits, PrefillLimits
from engine.core.scheduler import Scheduler
from engine.core.types import PENDING, Request, Sampling, StepOutput
from engine.executors.speculation.executor import SpeculativeExecutor
from engine.executors.speculation.lookup import LookupProposer
from tests.pure.counting_executor import CountingExecutor, answer

pytestmark = pytest.mark.slow

NUM_REQUESTS = 24
MAX_DRAFTS = 4


class GuessingDrafter:
    """Knows the whole answer, and is wrong every now and then."""

    level = 0

    def __init__(self, rng, arrival):
        self.rng, self.prompt_len = rng, arrival.prompt_len
        self.answer = answer(arrival.token_ids[: arrival.prompt_len], arrival.sampling)

    def propose(self, token_ids, max_drafts):
        num_new = len(token_ids) - self.prompt_len
        drafts = self.answer[num_new : num_new + min(max_drafts, self.rng.randrange(MAX_DRAFTS + 1))]
        return [token_id + (self.rng.random() < 0.2) for token_id in drafts]

    def end(self, token_ids):
        pass


@dataclass
class World:
    """A scheduler with limits drawn from a seed, and all that has happened to its requests."""

    rng: random.Random
    block_ratio: float
    caching: bool
    drafting: bool = False
    ahead: bool = False  # steps are launched before the one before is applied, where that is allowed
    num_host_blocks: int = 0
    talks: bool = False  # prompts go on with others
    groups: tuple[CacheGroup, ...] = FULL_ATTENTION
    requests: dict[str, Request] = field(default_factory=dict)
    forks: set[str] = field(default_factory=set)
    num_apart: int = 0  # forks that did not fit beside their leader
    ended: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    outputs: list[StepOutput] = field(default_factory=list)  # of steps that were launched and not applied
    num_ahead: int = 0
    num_swap_ins: int = 0  # blocks, from the host
    next_start: dict[tuple[str, int], int] = field(default_factory=dict)  # by request and number of preemptions

    def __post_init__(self):
        rng = self.rng
        self.block_size = rng.choice([1, 2, 4, 8])
        self.num_blocks = rng.randint(6, 40) * len(self.groups)
        max_batch = rng.randint(1, 6)
        own = random.Random(self.num_blocks)
        prefills = own.choice([None, PrefillLimits(own.randint(1, 4), own.randint(1, 2), own.choice([1, 4, 16]))])
        self.limits = Limits(
            max_batch, max_batch + rng.randrange(12), self.block_ratio, NUM_REQUESTS, prefills=prefills
        )
        self.limits = replace(self.limits, cache_groups=self.groups)
        pool = BlockPool(self.num_blocks, self.block_size, self.caching, self.num_host_blocks)
        self.executor = CountingExecutor(self.num_blocks, self.block_size, self.groups)
        if self.drafting:
            self.executor = SpeculativeExecutor(
                self.executor, MAX_DRAFTS, LookupProposer("ngram", partial(GuessingDrafter, rng))
            )
            self.limits = replace(self.limits, max_drafts=MAX_DRAFTS)
        self.scheduler = Scheduler(pool, self.limits)

    def add(self):
        """Add a request that fits. Half of the requests share a prefix, some were begun before a crash, and some want
        several answers.
        """
        rng, room = self.rng, self.num_blocks // len(self.groups) * self.block_size
        prompt_len = rng.randint(1, min(room, 40))
        start = 0 if rng.random() < 0.5 else rng.randrange(10**6)
        prompt = self.next_prompt(room) or [start + index // 3 for index in range(prompt_len)]
        request = self.make(prompt, room)
        if rng.random() < 0.2:
            whole = answer(prompt, request.sampling)
            request.token_ids += whole[: rng.randrange(len(whole))]
        num_forks = rng.choice([0, 0, 0, 1, 2, 5]) if request.num_new_tokens == 0 else 0
        request.forks = [self.make(prompt, room) for _ in range(num_forks)]
        self.scheduler.add(request, replay=request.num_new_tokens > 0)
        self.num_apart += num_forks - len(request.forks)
        self.forks.update(fork.request_id for fork in request.forks)

    def next_prompt(self, room):
        """Return a prompt that goes on with one that has ended, or differs from it near its end. `talks` only."""
        rng, ended = self.rng, [request for request in map(self.requests.get, self.ended) if self.talks]
        if not ended or rng.random() < 0.3:
            return None
        before = rng.choice(ended)
        end = rng.choice([len(before.token_ids), before.prompt_len]) - rng.choice([0, 0, rng.randint(0, 20)])
        return (before.token_ids[: max(end, 0)] + [rng.randrange(1009) for _ in range(rng.randint(1, 9))])[:room]

    def make(self, prompt, room):
        rng = self.rng
        in_prompt = random.Random(len(self.requests)).sample(prompt, k=len(self.requests) % 2)  # as behind messages
        sampling = Sampling(
            max_new_tokens=rng.randint(1, min(room - len(prompt) + 1, 30)),
            min_new_tokens=rng.choice([0, 0, 3]),
            temperature=rng.choice([0.0, 0.8]),
            seed=rng.randrange(3),
            presence_penalty=rng.choice([0, 0, 0, 0.5]),  # its tokens are never pending
            stop_token_ids=(prompt[-1] + rng.randint(1, 40), rng.randrange(1009), *in_prompt),
        )
        position = {"owner": rng.choice("ab"), "priority": rng.choice([0, 0, 1])}
        request = Request(str(len(self.requests)), list(prompt), len(prompt), sampling, **position)
        self.requests[request.request_id] = request
        return request

    def drop_one(self):
        open_ids = sorted(self.requests.keys() - set(self.ended) - set(self.dropped))
        if open_ids:
            self.dropped.append(self.rng.choice(open_ids))
            assert self.scheduler.drop(self.dropped[-1]) is self.requests[self.dropped[-1]]
            assert self.scheduler.drop(self.dropped[-1]) is None

    def step(self, drops):
        scheduler = self.scheduler
        if not self.outputs and not self.launch():
            assert scheduler.is_idle
            return
        if self.ahead and scheduler.may_run_ahead():
            self.num_ahead += self.launch()
        if self.rng.random() < drops:  # while steps run
            self.drop_one()
        self.apply()
        if not self.outputs:
            scheduler.check()

    def launch(self):
        before = {name: request.num_computed for name, request in self.scheduler.running.items()}
        batch = self.scheduler.next_batch()
        if batch is None:
            return False
        self.check_batch(batch)
        self.num_swap_ins += len(batch.swaps.ins) if batch.swaps else 0
        oldest = next(iter(self.scheduler.running.values()))
        is_stuck = oldest.num_computed == before.get(oldest.request_id)
        assert self.outputs or not is_stuck, "the oldest request did not get on"
        self.outputs.append(self.executor.launch(batch).result())
        return True

    def apply(self):
        for update in self.scheduler.apply(self.outputs.pop(0)):
            assert self.requests[update.request.request_id] is update.request
            assert update.request.request_id not in self.dropped
            if update.finish_reason:
                self.ended.append(update.request.request_id)
                self.reasons[update.request.request_id] = update.finish_reason

    def check_batch(self, batch):
        assert 0 < batch.num_tokens <= self.limits.max_batched_tokens
        assert len(batch.rows) <= len(self.scheduler.running) <= self.limits.max_batch
        assert not self.outputs or not any(each.needs_output_tokens for each in self.scheduler.running.values())
        by_slot = {request.slot: request for request in self.scheduler.running.values()}
        assert len({row.slot for row in batch.rows}) == len(batch.rows)
        for row in batch.rows:
            request = by_slot[row.slot]
            end = row.start + len(row.token_ids)
            is_pending = row.token_ids[0] == PENDING
            assert row.start < end <= len(request.token_ids) + is_pending
            assert not is_pending or self.outputs
            admission = request.request_id, request.num_preemptions
            begins = (
                request.num_cached if request.num_preemptions or request.request_id not in self.forks else row.start
            )
            if not self.drafting:
                assert row.start == self.next_start.get(admission, begins), "a position is missing or twice"
            self.next_start[admission] = end

    def check_end(self):
        self.executor.close()
        assert self.scheduler.is_idle
        assert self.scheduler.pool.num_held == 0
        assert sorted(self.ended + self.dropped) == sorted(self.requests)
        for request_id in self.ended:
            request = self.requests[request_id]
            prompt, tokens = request.token_ids[: request.prompt_len], request.token_ids[request.prompt_len :]
            assert tokens == answer(prompt, request.sampling)
            is_stop = tokens[-1] in request.sampling.stop_token_ids and len(tokens) > request.sampling.min_new_tokens
            assert self.reasons[request_id] == ("stop" if is_stop else "length")


def live(world, drops):
    while len(world.requests) < NUM_REQUESTS or not world.scheduler.is_idle:
        if len(world.requests) < NUM_REQUESTS and world.rng.random() < 0.4:
            world.add()
        if world.rng.random() < drops:  # between two steps
            world.drop_one()
        world.step(drops)
    world.check_end()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["one token", "drafts", "ahead", "drafts ahead"])
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("block_ratio", [0.01, 0.3, 0.99, 1])
def test_every_request_ends_once_with_its_own_tokens(block_ratio, caching, how):
    num_preemptions = num_cached = num_accepted = num_forks = num_apart = num_ahead = num_swap_ins = 0
    for seed in range(12):
        rng = random.Random(f"{block_ratio} {caching} {how} {seed}")
        num_host_blocks = (0, 1, 3, 100)[seed % 4] if caching else 0
        world = World(rng, block_ratio, caching, "drafts" in how, "ahead" in how, num_host_blocks)
        live(world, drops=0.05 if seed % 2 else 0)
        num_preemptions += world.scheduler.counters.num_preemptions
        num_cached += world.scheduler.counters.num_cached_tokens
        num_accepted += world.scheduler.counters.num_accepted_tokens
        num_forks += len(world.forks)
        num_apart += world.num_apart
        num_ahead += world.num_ahead
        num_swap_ins += world.num_swap_ins
    # With the worst case reserved no request is preempted, nor with one request at a time; else some must have been.
    assert num_preemptions > 0 if block_ratio == 0.99 else num_preemptions == 0 or block_ratio == 0.3
    assert (num_cached > 0) == caching
    assert (num_swap_ins > 5) == caching
    assert (num_accepted > 0) == ("drafts" in how)
    assert num_forks > 30
    assert num_apart > 20
    assert (num_ahead > 100) == ("ahead" in how)


WINDOW = CacheGroup(SLIDING_WINDOW, 7)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["one token", "drafts", "ahead", "drafts ahead"])
@pytest.mark.parametrize(
    "groups",
    [
        (WINDOW,),
        (CacheGroup(STATE),),
        (CacheGroup(PAGED), WINDOW, WINDOW),
        (CacheGroup(PAGED), CacheGroup(STATE), CacheGroup(STATE)),
        (CacheGroup(PAGED), CacheGroup(STATE, num_parts=3)),
        (CacheGroup(STATE), CacheGroup(SLIDING_WINDOW, 1), CacheGroup(PAGED), CacheGroup(SLIDING_WINDOW, 16)),
    ],
    ids=["window", "state", "paged and windows", "paged and states", "large states", "all kinds"],
)
def test_every_request_ends_once_with_its_own_tokens_whatever_the_cache_groups(groups, how, monkeypatch):
    monkeypatch.setattr(kv_cache_manager, "SNAPSHOT_INTERVAL", 8)
    num_preemptions = num_cached = num_swap_ins = num_accepted = 0
    for seed in range(12):
        rng = random.Random(f"{groups} {how} {seed}")
        block_ratio, num_host_blocks = (0.3, 0.75, 0.99, 1)[seed // 2 % 4], (0, 1, 3, 100)[seed % 4]
        world = World(rng, block_ratio, seed % 5 > 0, "drafts" in how, "ahead" in how, num_host_blocks, groups=groups)
        live(world, drops=0.05 if seed % 2 else 0)
        num_preemptions += world.scheduler.counters.num_preemptions
        num_cached += world.scheduler.counters.num_cached_tokens
        num_accepted += world.scheduler.counters.num_accepted_tokens
        num_swap_ins += world.num_swap_ins
    has_state = any(group.kind == STATE for group in groups)
    assert num_cached > 0 and num_swap_ins > 0
    assert num_preemptions > 0 or has_state or len(groups) == 1
    assert (num_accepted > 0) == ("drafts" in how)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["one token", "drafts", "ahead", "drafts ahead"])
@pytest.mark.parametrize(
    "groups",
    [
        (CacheGroup(PAGED), CacheGroup(STATE), CacheGroup(STATE)),
        (CacheGroup(PAGED), CacheGroup(STATE, num_parts=3), WINDOW),
    ],
    ids=["paged and states", "large states and a window"],
)
def test_prompts_that_go_on_with_answers_find_their_states(groups, how):
    num_cached = num_in_blocks = 0
    for seed in range(12):
        rng = random.Random(f"{groups} {how} {seed}")
        block_ratio, num_host_blocks = (0.3, 0.75, 0.99, 1)[seed // 2 % 4], (0, 1, 3, 100)[seed % 4]
        world = World(
            rng, block_ratio, True, "drafts" in how, "ahead" in how, num_host_blocks, groups=groups, talks=True
        )
        live(world, drops=0.05 if seed % 2 else 0)
        num_cached += world.scheduler.counters.num_cached_tokens
        num_in_blocks += sum(request.num_cached % world.block_size > 0 for request in world.requests.values())
    assert num_cached > 250 and num_in_blocks > 5


def test_no_request_starves_behind_requests_that_arrive_for_ever():
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
        scheduler.apply(executor.launch(batch).result())
    assert big.num_new_tokens == 8
