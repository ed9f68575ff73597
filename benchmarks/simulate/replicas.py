"""Simulation of replicas behind one front end, with the real router: every step of every engine is scheduled."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.simulate import logical_loop
from benchmarks.simulate.server import SimulatedServer
from benchmarks.simulate.step_time import StepTimes
from benchmarks.simulate.traffic import Arrival, answer_token
from engine.errors import RequestError
from engine.settings.config import Config
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

    @property
    def config(self) -> Config:
        return Config(batch_size=self.batch_size, splitwise_role="scheduler")


@dataclass
class Result:
    """Observations of the clients. Times are in seconds; each complete answer has one of each kind."""

    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    num_lost: int = 0  # ended with an error
    num_kills: int = 0
    num_continued: int = 0  # times that a request was sent to another replica
    num_steps: int = 0
    hit_rate: float = 0.0  # share of prompt tokens that were cached

    def check(self, num_requests: int) -> None:
        """Check that every request has ended exactly once."""
        assert len(self.e2e_s) + self.num_lost == num_requests, (len(self.e2e_s), self.num_lost, num_requests)


class SimulatedReplica(RemoteReplica):
    """The front end's view of a simulated server."""

    def __init__(self, server: SimulatedServer, number: int):
        self._server = server
        super().__init__((server.name, number), server.name, "", None)

    def _make(self) -> Any:
        self._connections = self._server  # type: ignore[assignment]
        return self._server


class FrontEnd(ReplicaSet):
    """Replicas of a front end without a model. They are given, so no names are resolved."""

    def __init__(self, servers: Iterable[SimulatedServer], config: Config):
        super().__init__(_NoModel(), config)  # type: ignore[arg-type]
        for number, server in enumerate(servers):
            replica = SimulatedReplica(server, number)
            task = asyncio.get_running_loop().create_task(replica.watch(self.served.identity))
            self._remote[server.name, number] = replica, task


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
    front_end, result = FrontEnd(servers, cluster.config), Result()
    backend = ReplicatedBackend(front_end)
    failing = asyncio.create_task(_fail(cluster, servers, rng)) if cluster.failures_per_minute else None
    await asyncio.sleep(WARM_UP_S)
    clients = []
    for arrival in arrivals:
        delay = WARM_UP_S + arrival.at - asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.0, delay))
        clients.append(asyncio.create_task(_client(backend, arrival, result)))
    await asyncio.gather(*clients)
    if failing:
        assert not failing.done()
    for server in servers:
        server.collect_counters()
    result.check(len(clients))
    result.num_kills = sum(server.num_kills for server in servers)
    result.num_continued = sum(replica.num_lost for replica in front_end.others)
    result.num_steps = sum(server.num_steps for server in servers)
    num_prompt_tokens = sum(server.num_prompt_tokens for server in servers)
    result.hit_rate = sum(server.num_cached_tokens for server in servers) / max(1, num_prompt_tokens)
    return result


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
