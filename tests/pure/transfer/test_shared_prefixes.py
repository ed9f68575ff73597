"""Replicas that pull cached blocks from each other: equal answers, whatever happens to the other replica."""

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.core import shared_prefixes
from engine.core.block_pool import BlockPool
from engine.core.limits import Limits
from engine.core.prefill_jobs import PrefillJob, PrefillJobs
from engine.core.scheduler import Scheduler
from engine.core.shared_prefixes import SharedPrefixes
from engine.core.types import Request, Sampling, StepOutput
from engine.transfer import messages
from engine.transfer.client import PulledBlocks, ReplicaClient
from tests.patience import PATIENCE_S
from tests.pure.transfer_pair import IDENTITY, TOKEN, VOCAB_SIZE, Link, a_loop, answers_of_one, serve

BLOCK_SIZE = 16
LONG = [index * 7 % VOCAB_SIZE for index in range(500)]
NUM_FULL = len(LONG) // BLOCK_SIZE
FEW = Sampling(max_new_tokens=4, temperature=0, num_logprobs=1)
SLOW_S = 1.0  # seconds of a token: pulls are always faster


@pytest.fixture(scope="module")
def graph_dir(exported):
    return exported("qwen2", block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def expected(graph_dir):
    return answers_of_one(a_loop(graph_dir), [(LONG, FEW)])["0"]


@pytest.fixture
def link(monkeypatch):
    for name, seconds in {"SILENT_S": 0.3, "LEASE_S": 0.4, "BEAT_S": 0.1}.items():
        monkeypatch.setattr(messages, name, seconds)
    link = Link()
    yield link
    link.close()


class Replica:
    """An engine that serves its cached blocks and pulls those of others."""

    def __init__(self, graph_dir, link=None, token_s=SLOW_S, identity=IDENTITY, before_block=lambda: None):
        self.loop, self.answers = a_loop(graph_dir), {}
        access = self.loop.executor.blocks()
        served = SimpleNamespace(read_block=lambda block: before_block() or access.read_block(block))
        self.loop.executor.blocks = lambda: served
        self.address = f"127.0.0.1:{serve(self.loop).port}"
        if link:
            link.target = int(self.address.rpartition(":")[2])
            self.address = f"127.0.0.1:{link.port}"
        pulled = PulledBlocks(access.write_block, len(access.read_block(0)), identity)
        source = ReplicaClient(pulled, TOKEN)
        self.loop.pull_prefills(SharedPrefixes(self.loop.scheduler, source, 32, lambda: token_s))

    def add(self, name, prompt, source, sampling=FEW, answer=()):
        """Add a request, which may have a part of its answer already."""
        request = Request(name, [*prompt, *answer], len(prompt), sampling, cached_at=source.address if source else "")
        request.prompt_outputs_sent = bool(answer)
        self.answers[name] = []
        self.loop.add(request)

    def turn(self):
        for update in self.loop.step():
            self.answers[update.request.request_id] += zip(update.token_ids, update.logprobs, strict=True)

    @property
    def counts(self):
        """Return the numbers of prompts for which a replica was asked, of failures and of pulled blocks."""
        found = self.loop.remote.counters
        return found.num_remote_prefills, found.num_remote_prefill_failures, found.num_pulled_blocks


def run(*replicas):
    """Run until all replicas are idle and hold no blocks."""
    deadline = time.monotonic() + PATIENCE_S
    while any(not each.loop.is_idle or each.loop.jobs.num_open or each.loop.remote.num_open for each in replicas):
        assert time.monotonic() < deadline
        for each in replicas:
            each.turn()
    for each in replicas:
        each.loop.scheduler.check()


def pair(graph_dir, link=None, num_cached=500, before_block=lambda: None, **taker):
    """Return a replica that has computed the beginning of LONG, and another one."""
    source = Replica(graph_dir, link, before_block=before_block)
    if num_cached:
        source.add("before", LONG[:num_cached], None)
        run(source)
    return source, Replica(graph_dir, **taker)


@pytest.mark.parametrize("num_cached", [0, 200, len(LONG)])
def test_blocks_that_another_replica_has_cached_are_not_computed(num_cached, graph_dir, expected):
    source, taker = pair(graph_dir, num_cached=num_cached)
    taker.add("0", LONG, source)
    run(source, taker)
    assert taker.answers["0"] == expected
    assert taker.counts == (1, 0, num_cached // BLOCK_SIZE)
    assert taker.loop.stats()["num_cached_tokens"] == num_cached // BLOCK_SIZE * BLOCK_SIZE


def test_two_replicas_pull_from_each_other_at_the_same_time(graph_dir, expected):
    one, other = Replica(graph_dir), Replica(graph_dir)
    reverse = LONG[::-1]
    for each, prompt in ((one, LONG), (other, reverse)):
        each.add("before", prompt, None)
    run(one, other)
    one.add("0", reverse, other)
    other.add("0", LONG, one)
    run(one, other)
    assert (one.answers["0"], other.answers["0"]) == (other.answers["before"], expected)
    assert one.counts == other.counts == (1, 0, NUM_FULL)


@pytest.mark.parametrize("family", ["qwen2", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_a_running_request_continues_at_another_replica(family, exported):
    """The last tokens, which are not in a full block, are computed again."""
    graph_dir, sampling = exported(family, block_size=BLOCK_SIZE), replace(FEW, max_new_tokens=40)
    whole = answers_of_one(a_loop(graph_dir), [(LONG, sampling)])["0"]
    source, taker = Replica(graph_dir), Replica(graph_dir)
    source.add("0", LONG, None, sampling)
    while len(source.answers["0"]) < 21:
        source.turn()
    begun = list(source.answers["0"])
    source.loop.drop("0")
    taker.add("0", LONG, source, sampling, [token_id for token_id, _ in begun])
    run(source, taker)
    assert begun + taker.answers["0"] == whole
    assert taker.counts[:2] == (1, 0)
    assert taker.loop.stats()["num_cached_tokens"] == (len(LONG) + len(begun) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("event", ["cut", "freeze"])
def test_a_replica_that_dies_during_a_pull_leaves_the_blocks_that_have_arrived(event, graph_dir, link, expected):
    numbers = itertools.count()
    source, taker = pair(graph_dir, link, before_block=lambda: next(numbers) == 20 and getattr(link, event)())
    taker.add("0", LONG, source)
    run(source, taker)
    assert taker.answers["0"] == expected
    assert taker.counts[:2] == (1, 1)
    assert taker.counts[2] < NUM_FULL


def test_a_block_with_a_wrong_checksum_is_computed(graph_dir, link, expected):
    source, taker = pair(graph_dir, link)
    link.is_damaging = True
    taker.add("0", LONG, source)
    run(source, taker)
    assert taker.answers["0"] == expected
    assert taker.counts[:2] == (1, 1)


def test_a_replica_of_another_model_is_not_asked_again(graph_dir, expected, caplog):
    source, taker = pair(graph_dir, identity={"model": "other"})
    for name in ("0", "1"):
        taker.add(name, LONG[int(name) :], source)
        run(source, taker)
    assert taker.answers["0"] == expected
    assert taker.counts == (1, 1, 0)
    assert "model of the prefill instance is tiny" in caplog.text


def test_a_replica_that_cannot_be_reached_does_not_hold_up_a_request(graph_dir, expected):
    taker = Replica(graph_dir)
    taker.add("0", LONG, SimpleNamespace(address="127.0.0.1:1"))
    run(taker)
    assert taker.answers["0"] == expected
    assert taker.counts == (1, 1, 0)


def test_a_pull_that_ends_while_it_begins_has_ended():
    def begin(pull):
        pull.has_ended = True  # as the network thread does when a connection is refused
        return True

    scheduler = Scheduler(BlockPool(200, BLOCK_SIZE), Limits(max_batch=4, max_batched_tokens=64))
    remote = SharedPrefixes(scheduler, SimpleNamespace(begin=begin, end=lambda pull: None), 32, lambda: SLOW_S)
    request = Request("0", LONG, len(LONG), FEW, cached_at="gone:1")
    scheduler.add(request)
    remote.consider(request)
    remote.poll()
    remote.poll()
    assert not request.awaits_blocks


def test_a_pull_that_takes_longer_than_to_compute_the_rest_is_given_up(graph_dir, link, expected, monkeypatch):
    source, taker = pair(graph_dir, link, token_s=1e-4)
    monkeypatch.setattr(messages, "SILENT_S", 2 * PATIENCE_S)
    link.freeze()
    taker.add("0", LONG, source)
    run(source, taker)
    assert taker.answers["0"] == expected
    assert taker.counts == (1, 1, 0)


def test_nothing_is_pulled_before_the_time_of_a_token_is_known(graph_dir, expected):
    source, taker = pair(graph_dir, token_s=0.0)
    taker.add("0", LONG, source)
    run(source, taker)
    assert taker.answers["0"] == expected
    assert taker.counts == (0, 0, 0)


def test_the_time_of_a_token_is_measured_in_steps_with_prompts(graph_dir):
    loop = a_loop(graph_dir)
    answers_of_one(loop, [([1, 2, 3], FEW)])
    assert loop.token_s == 0
    answers_of_one(loop, [(LONG, FEW)])
    assert 0 < loop.token_s <= loop.stats()["step_time_s"] / 64


def test_one_message_says_what_is_cached_although_more_is_computed_later():
    scheduler, found = Scheduler(BlockPool(200, BLOCK_SIZE), Limits(max_batch=4, max_batched_tokens=64)), []
    jobs, request = PrefillJobs(scheduler), Request("0", LONG[:100], 100, FEW)
    scheduler.add(request)
    keys, _ = scheduler.longest_prefix(request)
    listener = SimpleNamespace(ready=lambda job, indices: found.append(list(indices)))
    for num_known in (0, 4, 6):
        jobs.begin(PrefillJob(f"job {num_known}", None, keys, listener))
        jobs.poll()
        assert found.pop() == list(range(num_known))
        if batch := scheduler.next_batch():
            num_sampled = sum(row.num_sampled for row in batch.rows)
            jobs.take(scheduler.apply(StepOutput([[5]] * num_sampled, [None] * num_sampled)))
    assert not found


def test_a_request_that_finds_no_room_for_a_pull_is_computed_at_once():
    scheduler = Scheduler(BlockPool(8, BLOCK_SIZE), Limits(max_batch=4, max_batched_tokens=64))
    remote = SharedPrefixes(scheduler, None, 32, token_s=lambda: SLOW_S)
    scheduler.add(Request("running", LONG[:40], 40, FEW))
    assert scheduler.next_batch()
    request = Request("0", LONG[100:200], 100, FEW, cached_at="any:1")
    scheduler.add(request)
    remote.consider(request)
    remote.poll()
    assert not request.awaits_blocks
    assert remote.counters.num_remote_prefills == 0


def test_a_replica_that_was_too_slow_to_answer_is_asked_for_longer_prompts_only(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=1000.0)
    monkeypatch.setattr("engine.core.shared_prefixes.time", clock)
    monkeypatch.setattr("engine.core.remote_prefill.time", clock)
    scheduler = Scheduler(BlockPool(200, BLOCK_SIZE), Limits(max_batch=4, max_batched_tokens=64))
    remote = SharedPrefixes(
        scheduler, SimpleNamespace(begin=lambda pull: True, end=lambda pull: None), 32, token_s=lambda: 0.01
    )

    def ask(num_tokens):
        request = Request(str(num_tokens), LONG[:num_tokens], num_tokens, FEW, cached_at="slow:1")
        scheduler.add(request)
        remote.consider(request)
        remote.poll()
        delayed_s = 0.0
        while request.awaits_blocks:
            clock.now += 0.01
            delayed_s += 0.01
            remote.poll()
        return delayed_s

    assert 0.2 < ask(100) < 0.3  # a quarter of the time to compute 100 tokens, 1 s
    assert ask(190) == 0
    assert 0.5 < ask(220) < 0.6


def test_a_slow_replica_is_asked_again_when_its_speed_is_old_news(monkeypatch):
    begun = []
    source = SimpleNamespace(begin=lambda pull: begun.append(pull) or True, end=lambda pull: None)
    scheduler = Scheduler(BlockPool(200, BLOCK_SIZE), Limits(max_batch=4, max_batched_tokens=64))
    remote = SharedPrefixes(scheduler, source, 32, token_s=lambda: 0.001)

    def ask(first):
        request = Request(str(first), LONG[first : first + 100], 100, FEW, cached_at="slow:1")
        scheduler.add(request)
        remote.consider(request)
        remote.poll()
        while begun:
            pull = begun.pop()
            pull.num_found = len(pull.keys)
            pull.asked_at, pull.arrived_at, pull.has_ended = 0.0, 1.0, True  # 100 tokens are computed in 0.1 s
            pull.arrived += range(len(pull.keys))
            remote.poll()

    ask(0)
    ask(1)
    assert remote.counters.num_remote_prefills == 1
    monkeypatch.setattr(shared_prefixes, "FORGET_S", -1.0)
    ask(2)
    assert remote.counters.num_remote_prefills == 2
