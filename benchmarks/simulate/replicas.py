"""Simulation of replicas behind front ends, with the real router: every step of every engine is scheduled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

from benchmarks.simulate import logical_loop
from benchmarks.simulate.server import SimulatedServer
from benchmarks.simulate.step_time import StepTimes
from benchmarks.simulate.traffic import Arrival, answer_token
from engine.errors import RequestError
from engine.settings.config import Config
from engine.wire import Delta
from gateway.backend import timeout
from gateway.replicas.backend import ReplicatedBackend
from gateway.replicas.replica_set import RemoteReplica, ReplicaSet

TIMEOUT_S = 600.0  # of a request
WARM_UP_S = 1.0  # until the front end knows its replicas


@dataclass(frozen=True)
class Cluster:
    """Replicas and how often they fail."""

    num_replicas: int
    times: StepTimes
    num_blocks: int = 2000
    batch_size: int = 50
    failures_per_minute: float = 0.0  # share of the replicas
    restart_s: float = 30.0
    are_front_ends: bool = False  # requests go to the replicas in turn, which place them; else one without a model does
    num_clients: int = 0  # that send a request when their previous one has ended; 0: requests come at their times

    @property
    def config(self) -> Config:
        return Config(batch_size=self.batch_size)


@dataclass
class Result:
    """Observations of the clients. Times are in seconds; each complete answer has one of each kind."""

    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    num_lost: int = 0  # ended with an error
    num_kills: int = 0
    num_continued: int = 0  # times that a request was sent to another replica
    num_forwarded: int = 0  # requests that a replica has sent to another one
    num_steps: int = 0
    hit_rate: float = 0.0  # share of prompt tokens that were cached
    loads: list[int] = field(default_factory=list)  # tokens that each replica has computed

    @property
    def load_max_over_mean(self) -> float:
        return max(self.loads) * len(self.loads) / max(1, sum(self.loads))

    def check(self, num_requests: int) -> None:
        """Check that every request has ended exactly once."""
        assert len(self.e2e_s) + self.num_lost == num_requests, (len(self.e2e_s), self.num_lost, num_requests)


class _Connection:
    """Connection of a front end to a server, and the backend behind it."""

    def __init__(self, server: SimulatedServer, front_end: str):
        self._server, self._front_end = server, front_end

    async def poll(self, request: bytes, timeout_s: float) -> bytes:
        return await self._server.poll(request, timeout_s)

    async def generate(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[Delta, None]:
        """Yield the answer to a request, as `gateway.grpc_server.replica_methods` does."""
        with self._server.replicas.served.forwarded(body, self._front_end) as request:
            async with contextlib.aclosing(self._server.generate(body, timeout_s)) as answers:
                async for answer in answers:
                    request.num_tokens = 0
                    yield answer

    async def close(self) -> None:
        """Do nothing: `kill` ends the requests."""


class SimulatedReplica(RemoteReplica):
    """The front end's view of a simulated server."""

    def __init__(self, server: SimulatedServer, number: int, front_end: str):
        self._server = server
        super().__init__((server.name, number), server.name, "", None, front_end)

    def _make(self) -> Any:
        self._connections = _Connection(self._server, self._front_end)  # type: ignore[assignment]
        return self._connections


def connect(front_end: ReplicaSet, servers: Iterable[SimulatedServer]) -> None:
    """Let a front end poll these servers, instead of those that REPLICAS names."""
    loop = asyncio.get_running_loop()
    for number, server in enumerate(servers):
        replica = SimulatedReplica(server, number, front_end.served.identity.hex())
        task = loop.create_task(replica.watch(front_end.served.identity))
        front_end._remote[server.name, number] = replica, task
    if front_end.has_model:
        front_end._tasks = [loop.create_task(front_end._watch())]


class FrontEnd(ReplicaSet):
    """Replicas of a front end without a model."""

    def __init__(self, servers: Iterable[SimulatedServer], config: Config):
        super().__init__(_NoModel(), replace(config, splitwise_role="scheduler"))  # type: ignore[arg-type]
        connect(self, servers)


class _NoModel:
    async def probe(self, with_metrics: bool = False) -> Any:
        raise RequestError("there is no model")


def simulate(cluster: Cluster, arrivals: Iterable[Arrival], seed: int = 0) -> Result:
    """Return the result of a simulation that ends when every request has ended."""
    logging.getLogger("gateway.replicas").setLevel(logging.ERROR)  # every loss would be a warning
    return logical_loop.run(_simulate(cluster, arrivals, random.Random(seed)))


async def _simulate(cluster: Cluster, arrivals: Iterable[Arrival], rng: random.Random) -> Result:
    names = [f"replica-{i}" for i in range(cluster.num_replicas)]
    servers = [SimulatedServer(name, cluster.times, cluster.num_blocks, cluster.config) for name in names]
    front_ends, result = [server.replicas for server in servers], Result()
    if cluster.are_front_ends:
        for each in front_ends:
            connect(each, servers)
    else:
        front_ends = [FrontEnd(servers, cluster.config)]
    backends = cycle([ReplicatedBackend(each) for each in front_ends])
    failing = asyncio.create_task(_fail(cluster, servers, rng)) if cluster.failures_per_minute else None
    await asyncio.sleep(WARM_UP_S)
    num_requests = await (_in_turn if cluster.num_clients else _at_their_times)(cluster, backends, arrivals, result)
    if failing:
        assert not failing.done()
    for server in servers:
        server.collect_counters()
    result.check(num_requests)
    result.num_kills = sum(server.num_kills for server in servers)
    result.num_continued = sum(replica.num_lost for each in front_ends for replica in (each.local, *each.others))
    result.num_forwarded = sum(replica.num_requests for each in front_ends for replica in each.others)
    result.num_steps = sum(server.num_steps for server in servers)
    num_prompt_tokens = sum(server.num_prompt_tokens for server in servers)
    result.hit_rate = sum(server.num_cached_tokens for server in servers) / max(1, num_prompt_tokens)
    result.loads = [each.num_prompt_tokens - each.num_cached_tokens + each.num_generated_tokens for each in servers]
    return result


async def _at_their_times(
    cluster: Cluster, backends: Iterator[ReplicatedBackend], arrivals: Iterable[Arrival], result: Result
) -> int:
    clients = []
    for arrival in arrivals:
        delay = WARM_UP_S + arrival.at - asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.0, delay))
        clients.append(asyncio.create_task(_client(next(backends), arrival, result)))
    await asyncio.gather(*clients)
    return len(clients)


async def _in_turn(
    cluster: Cluster, backends: Iterator[ReplicatedBackend], arrivals: Iterable[Arrival], result: Result
) -> int:
    coming, num_requests = iter(arrivals), 0

    async def client() -> None:
        nonlocal num_requests
        for arrival in coming:
            num_requests += 1
            await _client(next(backends), arrival, result)

    await asyncio.gather(*(client() for _ in range(cluster.num_clients)))
    return num_requests


async def _client(backend: ReplicatedBackend, arrival: Arrival, result: Result) -> None:
    clock, first = asyncio.get_running_loop().time, 0.0
    tokens: list[int] = []
    began = clock()
    try:
        async with timeout(TIMEOUT_S):
            async for answer in backend.generate(arrival.body, TIMEOUT_S):
                first = first or clock()
                assert answer.send_idx == len(tokens)
                tokens += answer.token_ids
    except (RequestError, asyncio.TimeoutError):
        result.num_lost += 1
        return
    assert tokens == [answer_token(i) for i in range(arrival.num_tokens)], "a token is missing or twice"
    result.ttft_s.append(first - began)
    result.e2e_s.append(clock() - began)


async def _fail(cluster: Cluster, servers: list[SimulatedServer], rng: random.Random) -> None:
    """Kill a replica at random times, and start it again later, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(rng.expovariate(cluster.failures_per_minute * len(servers) / 60))
        server = rng.choice(servers)
        if server.is_up:
            server.kill()
            loop.call_later(cluster.restart_s, server.start)
