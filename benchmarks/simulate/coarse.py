"""Coarse simulation of many replicas: requests are events, steps are not.

A replica with k running requests decodes at the rate of steps of k answer tokens, and a prompt stops its decoding for
the time of the prompt's tokens. Placement is the router's score of the same number of candidates, which are drawn by
hashes of the session and the prefix, because ranking all replicas for every request would take most of the time.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, count

from benchmarks.simulate.replicas import Cluster, Result
from benchmarks.simulate.step_time import StepTimes
from benchmarks.simulate.traffic import Arrival, num_tokens_of
from engine.placement import KnownPrefixes
from gateway.replicas.placement import NUM_BY_PREFIX, NUM_BY_SESSION, PromptKeys, prompt_keys, score

BLOCK_SIZE = 64  # tokens of a block, and of a key of a prompt
HEADER_LEN = num_tokens_of({"role": "assistant", "content": ""})
NUM_DRAWS = 16  # replicas from one hash
RESTART = -1  # version of an event that starts a replica
TOLERANCE = 1e-6  # of a number of steps


@dataclass(eq=False, slots=True)
class CoarseRequest:
    """A request with the part of its answer that a lost replica has computed."""

    at: float
    keys: PromptKeys
    system_len: int  # tokens of the system prompt
    prompt_len: int
    num_tokens: int
    num_done: int = 0
    first_at: float = -1.0  # time of the first token
    begin: float = 0.0  # steps of the replica when its first token here came
    has_begun: bool = False  # here
    num_uncached: int = 0  # tokens of the prompt to compute here
    step_at: float = 0.0  # time of its first token here

    @property
    def mean_len(self) -> int:
        """Return how many positions its answer tokens attend to on average."""
        return self.prompt_len + (self.num_done + self.num_tokens) // 2

    @property
    def end(self) -> float:
        """Return the steps of the replica at which the answer is complete."""
        return self.begin + self.num_tokens - self.num_done - 1


@dataclass(eq=False, slots=True)
class CoarseReplica:
    """A replica: its requests, and the number of steps that it has made, which need not be a whole one."""

    identity: bytes
    times: StepTimes
    batch_size: int
    max_keys: int
    max_step_tokens: int
    is_up: bool = True
    known: KnownPrefixes = field(default_factory=KnownPrefixes)
    sessions: dict[bytes, int] = field(default_factory=dict)  # tokens of prompt and answer that are cached
    running: dict[CoarseRequest, None] = field(default_factory=dict)
    waiting: deque[CoarseRequest] = field(default_factory=deque)
    prompts: deque[CoarseRequest] = field(default_factory=deque)  # running without a first token, in their order
    steps: float = 0.0
    at: float = 0.0  # time for which `steps` holds
    stalled_until: float = 0.0  # by prompts
    num_waiting_tokens: int = 0
    num_positions: int = 0  # attended by a step
    version: int = 0  # of its next event

    @property
    def num_running(self) -> int:
        """Return the number of open requests, which the only front end knows."""
        return len(self.running) + len(self.waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Return the tokens of prompts that are to be computed."""
        return self.num_waiting_tokens

    @property
    def step_s(self) -> float:
        return self.times.duration((0, len(self.running) - len(self.prompts), self.num_positions))

    def advance(self, now: float) -> None:
        """Let it decode until `now`."""
        begin = max(self.at, min(self.stalled_until, now))
        if len(self.running) > len(self.prompts):
            self.steps += (now - begin) / self.step_s
        self.at = now

    def add(self, request: CoarseRequest, now: float) -> None:
        """Start a request, or let it wait for a place in the batch."""
        # The system prompt is cached by any conversation, more of the prompt only by its own.
        by_prefix = min(request.system_len, self.known.count(request.keys.chain) * BLOCK_SIZE)
        cached = max(by_prefix, self.sessions.get(request.keys.session, 0))
        cached = min(cached, request.prompt_len - 1) // BLOCK_SIZE * BLOCK_SIZE
        request.has_begun, request.num_uncached = False, request.prompt_len - cached + request.num_done
        self.known.add(request.keys.chain, self.max_keys)
        self.sessions[request.keys.session] = request.prompt_len + request.num_tokens
        self.num_waiting_tokens += request.num_uncached
        if len(self.running) < self.batch_size:
            self._start(request, now)
        else:
            self.waiting.append(request)

    def _start(self, request: CoarseRequest, now: float) -> None:
        step_s, count = self.step_s, request.num_uncached
        # A request that arrives during a step is in the step after the next one; that step is on average half over.
        wait_s = 1.5 * step_s if self.running else 0.0
        positions = count * (request.prompt_len + request.num_done - count // 2)
        work_s = self.times.prompt_token_s * count + self.times.position_s * positions
        num_steps = -(-count // self.max_step_tokens)
        request.step_at = max(now + wait_s, self.stalled_until) + work_s + num_steps * step_s
        self.stalled_until = max(now, self.stalled_until) + work_s
        self.running[request] = None
        self.prompts.append(request)

    def next_event(self) -> float | None:
        """Return the time of the next first token or end of an answer."""
        times = [self.prompts[0].step_at] if self.prompts else []
        ends = [request.end for request in self.running if request.has_begun]
        if ends:
            times.append(max(self.at, self.stalled_until) + max(0.0, min(ends) - self.steps) * self.step_s)
        return min(times, default=None)

    def take(self, now: float) -> Iterator[CoarseRequest]:
        """Note the first tokens until `now`, and yield the requests whose answers are complete."""
        while self.prompts and self.prompts[0].step_at <= now:
            request = self.prompts.popleft()
            self.num_waiting_tokens -= request.num_uncached
            self.num_positions += request.mean_len
            request.begin, request.has_begun = self.steps, True
            if request.first_at < 0:
                request.first_at = now
        for request in [each for each in self.running if each.has_begun and each.end <= self.steps + TOLERANCE]:
            del self.running[request]
            self.num_positions -= request.mean_len
            yield request
            if self.waiting:
                self._start(self.waiting.popleft(), now)

    def kill(self) -> list[CoarseRequest]:
        """Forget everything and return the requests, with the tokens that they have by now."""
        lost = [*self.running, *self.waiting]
        for request in lost:
            if request.has_begun:
                num_new = int(self.steps - request.begin) + 1
                request.num_done = min(request.num_tokens - 1, request.num_done + num_new)
        self.running.clear()
        self.waiting.clear()
        self.prompts.clear()
        self.known, self.sessions, self.is_up = KnownPrefixes(), {}, False
        self.num_waiting_tokens, self.num_positions, self.stalled_until = 0, 0, 0.0
        self.version += 1
        return lost


class CoarseCluster:
    """The replicas, the events, and the requests that wait because every replica is down."""

    def __init__(self, cluster: Cluster, rng: random.Random):
        self._cluster, self._rng = cluster, rng
        most = cluster.config.max_step_tokens
        self._replicas = [
            CoarseReplica(f"replica-{i}".encode(), cluster.times, cluster.batch_size, cluster.num_blocks, most)
            for i in range(cluster.num_replicas)
        ]
        self._num_up = cluster.num_replicas
        self._events: list[tuple[float, int, CoarseReplica | None, int]] = []  # time, number, replica and its version
        self._number = count()
        self._num_open, self._parked = 0, list[CoarseRequest]()
        self._num_prompt_tokens = self._num_cached_tokens = 0
        self.result = Result()

    def run(self, arrivals: Iterable[Arrival]) -> Result:
        """Return the result when every request has ended."""
        num_requests, coming = 0, iter(arrivals)
        next_arrival = next(coming, None)
        self._plan_failure(0.0)
        while next_arrival or self._num_open:
            assert next_arrival or self._events, f"{self._num_open} requests wait, but no event is left"
            if next_arrival and not (self._events and self._events[0][0] < next_arrival.at):
                self._num_open, num_requests = self._num_open + 1, num_requests + 1
                self._place(_request_of(next_arrival), next_arrival.at)
                next_arrival = next(coming, None)
            else:
                self._handle(*heapq.heappop(self._events))
        self.result.check(num_requests)
        self.result.hit_rate = self._num_cached_tokens / max(1, self._num_prompt_tokens)
        return self.result

    def _handle(self, now: float, _: int, replica: CoarseReplica | None, version: int) -> None:
        if replica is None:
            self._fail(self._rng.choice(self._replicas), now)
        elif version == RESTART:
            replica.is_up, replica.at, self._num_up = True, now, self._num_up + 1
            parked, self._parked = self._parked, []
            for request in parked:
                self._place(request, now)
        elif version == replica.version:
            replica.advance(now)
            for request in replica.take(now):
                self._num_open -= 1
                self.result.ttft_s.append(request.first_at - request.at)
                self.result.e2e_s.append(now - request.at)
            self._plan(replica)

    def _place(self, request: CoarseRequest, now: float) -> None:
        candidates = [
            *self._draw(request.keys.session, NUM_BY_SESSION),
            *self._draw(request.keys.prefix, NUM_BY_PREFIX),
        ]
        if not candidates:
            self._parked.append(request)
            return
        replica = min(candidates, key=lambda each: score(request.keys, each))
        replica.advance(now)
        replica.add(request, now)
        if not request.num_done:
            self._num_prompt_tokens += request.prompt_len
            self._num_cached_tokens += request.prompt_len - request.num_uncached
        self._plan(replica)

    def _draw(self, key: bytes, most: int) -> list[CoarseReplica]:
        """Return the first replicas that are up of a sequence that follows from `key`, which is about as in a ranking:
        without a replica the others keep their order."""
        found: dict[CoarseReplica, None] = {}
        wanted, draws = min(most, self._num_up), chain.from_iterable(_numbers(key, i) for i in count())
        while len(found) < wanted:
            replica = self._replicas[next(draws) % len(self._replicas)]
            if replica.is_up:
                found[replica] = None
        return list(found)

    def _plan(self, replica: CoarseReplica) -> None:
        replica.version += 1
        if (at := replica.next_event()) is not None:
            heapq.heappush(self._events, (at, next(self._number), replica, replica.version))

    def _plan_failure(self, now: float) -> None:
        if rate := self._cluster.failures_per_minute * len(self._replicas) / 60:
            heapq.heappush(self._events, (now + self._rng.expovariate(rate), next(self._number), None, 0))

    def _fail(self, replica: CoarseReplica, now: float) -> None:
        self._plan_failure(now)
        if not replica.is_up:
            return
        replica.advance(now)
        self._num_up -= 1
        self.result.num_kills += 1
        lost = replica.kill()
        heapq.heappush(self._events, (now + self._cluster.restart_s, next(self._number), replica, RESTART))
        for request in lost:
            self.result.num_continued += 1
            self._place(request, now)


def _numbers(key: bytes, index: int) -> Iterator[int]:
    digest = blake2b(key, digest_size=4 * NUM_DRAWS, salt=index.to_bytes(8, "big")).digest()
    return (int.from_bytes(digest[i : i + 4], "big") for i in range(0, len(digest), 4))


def _request_of(arrival: Arrival) -> CoarseRequest:
    keys = prompt_keys(arrival.body)
    counts = [num_tokens_of(message) for message in arrival.body["messages"]]
    return CoarseRequest(arrival.at, keys, counts[0], sum(counts) + HEADER_LEN, arrival.num_tokens)


def simulate_coarsely(cluster: Cluster, arrivals: Iterable[Arrival], seed: int = 0) -> Result:
    """Return the result of a simulation that ends when every request has ended."""
    return CoarseCluster(cluster, random.Random(seed)).run(arrivals)
