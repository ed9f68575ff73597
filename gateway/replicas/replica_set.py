"""The replicas of this model: they are found by REPLICAS, and polled once a second for their state and their load."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from engine.address import in_url
from engine.placement import KnownPrefixes
from engine.settings.config import Config
from engine.settings.disaggregation import SCHEDULER
from engine.settings.keys import replica_token
from engine.wire import owner_of, with_owner
from gateway.backend import Backend
from gateway.health import ANSWER_WITHIN_S, CachedHealthCheck, HealthStatus, check_model
from gateway.replicas.connections import ReplicaConnections, replica_credentials
from gateway.replicas.placement import PromptKeys, choose
from gateway.replicas.replica import Arithmetic, Replica
from gateway.replicas.served import Load, Poll, ServedRequests, Summary, read_summary, write
from gateway.triton_client import TritonBackend

log = logging.getLogger(__name__)

POLL_EVERY_S = 1.0
SILENT_S = 2.0  # a replica without an answer for this time is lost
PROBE_RENEWAL = 0.6  # the model is asked at most three times a second, however many replicas poll this server
RESOLVE_EVERY_S = 5.0
FIND_WITHIN_S = 0.5  # a client waits that resumes its answer

Address = tuple[str, int]


class RemoteReplica(Replica):
    """Another server. `is_self` is set when it turns out to be this one."""

    def __init__(
        self,
        address: Address,
        host: str,
        token: str,
        credentials: grpc.ChannelCredentials | None,
        front_end: str = "",
    ):
        self._connect = partial(ReplicaConnections, address, host, token, credentials, front_end)
        self._front_end, self._num_keys = front_end, 0
        super().__init__(f"{in_url(address[0])}:{address[1]}", self._make)
        self.host, self.is_self = in_url(address[0]), False
        self._answered_at = 0.0  # time of the event loop

    def _make(self) -> Backend:
        self._connections = self._connect()
        return TritonBackend(self._connections)

    async def poll(self, find: tuple[str, str] | None = None, within_s: float = SILENT_S) -> Summary:
        """Ask for the news. Raise AioRpcError."""
        poll = write(Poll(self.identity, self._num_keys, find, self._front_end))
        summary = read_summary(await self._connections.poll(poll, within_s))
        self._answered_at = asyncio.get_running_loop().time()
        self._take(summary)
        return summary

    def _take(self, summary: Summary) -> None:
        if summary.is_all:
            self.known = KnownPrefixes()
        self.known.add(summary.keys)
        self.identity, self._num_keys = summary.identity, summary.num_keys
        if summary.state and not self.state:
            log.info("replica %s answers, model %s", self.name, summary.state.model_hash)
        self.state, self.reason, self.load_elsewhere = summary.state, summary.reason, summary.load

    async def watch(self, own_identity: bytes) -> None:
        """Poll until cancelled, or until this is found to be the server itself."""
        clock = asyncio.get_running_loop().time
        self._answered_at = clock()
        while not self.is_self:
            started = clock()
            try:
                await self.poll(within_s=max(0.1, self._answered_at + SILENT_S - started))
                self.is_self = self.identity == own_identity
            except grpc.aio.AioRpcError as error:
                self._note_failure(f"{error.code().name.lower()}: {error.details()}")
            except Exception as error:  # whatever it is, the replica is asked again
                self._note_failure(f"{type(error).__name__}: {error}")
            await asyncio.sleep(max(0.0, started + POLL_EVERY_S - clock()))
        await self.backend.close()

    def _note_failure(self, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        is_silent = now - self._answered_at >= SILENT_S - 0.05
        if reason != self.reason:
            log.warning("replica %s does not answer: %s", self.name, reason)
        self.suspend(reason)
        if is_silent:
            self.lose(f"no answer for {SILENT_S:g} s")
            self._answered_at = now


class ReplicaSet:
    """This server (`local`) and the other replicas. `start` must be called in the event loop that uses it."""

    def __init__(self, local: Backend, config: Config, identity: bytes = b""):
        self.served = ServedRequests(identity)
        self.local = Replica("this server", lambda: local)
        self.local.identity, self.local.known = self.served.identity, self.served.known
        self._local_ready = CachedHealthCheck(self._check_local, ANSWER_WITHIN_S, PROBE_RENEWAL)
        self._num_unattended = 0  # open requests of this server that no front end waits for
        self._front_end = self.served.identity.hex()
        self._addresses = config.replica_addresses
        self.has_model = config.splitwise_role != SCHEDULER
        self.token = config.peer_token or replica_token(config.owners)
        self._new_replica: Callable[[Address, str], RemoteReplica] = partial(
            RemoteReplica, token=self.token, credentials=replica_credentials(config), front_end=self._front_end
        )
        self._remote: dict[Address, tuple[RemoteReplica, asyncio.Task[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to resolve the names and to poll."""
        self._tasks = [asyncio.create_task(self._resolve())]
        self._tasks.append(asyncio.create_task(self._watch()))

    async def close(self) -> None:
        """Stop polling and close all connections."""
        watching = [task for _, task in self._remote.values()]
        for task in (*self._tasks, *watching):
            task.cancel()
        await asyncio.gather(*(each.backend.close() for each in (self.local, *self.others)))

    @property
    def others(self) -> list[RemoteReplica]:
        """Return the other servers, whether or not they answer."""
        return [replica for replica, _ in self._remote.values() if not replica.is_self]

    def choose(
        self, keys: PromptKeys, begun: Arithmetic | None, full: Iterable[Replica], lora: str | None
    ) -> Replica | None:
        """Return the replica for a request, or None if none is ready. If an answer has begun, the same model must
        continue it, if possible with the same fingerprint. Otherwise the model is that of this server, or that of most
        replicas while this server is not ready.
        """
        self.local.load_elsewhere = self._load(self._front_end)
        ready = [each for each in (self.local, *self.others) if each.is_ready and each not in full]
        model = begun.model if begun else ""
        if begun is None and ready:
            models = [each.model for each in ready]
            model = self.local.model if self.local.is_ready else max(models, key=models.count)
        ready = [each for each in ready if each.model == model]
        if begun:
            ready = [each for each in ready if each.arithmetic == begun] or ready
        if lora is not None:  # one that has just been loaded is known after the next poll
            ready = [each for each in ready if each.state and lora in (each.state.loras or ())] or ready
        return choose(keys, ready, self.local)

    def with_usage(self, body: dict[str, Any], replica: Replica) -> dict[str, Any]:
        """Return a request for `replica` with what its owner uses at the others, if the owner has limits."""
        if (owner := owner_of(body)).is_unlimited:
            return body
        others = [each.usage_of(owner.name) for each in (self.local, *self.others) if each is not replica]
        num_open, num_tokens = sum(each[0] for each in others), sum(each[1] for each in others)
        return with_owner(body, replace(owner, num_open_elsewhere=num_open, num_tokens_elsewhere=num_tokens))

    async def find(self, owner: str, req_id: str) -> Replica | None:
        """Return the replica that has computed the request, or None."""
        if self.served.has(owner, req_id):
            return self.local

        async def ask(replica: RemoteReplica) -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return (await replica.poll((owner, req_id), FIND_WITHIN_S)).has_request
            return False

        others = [each for each in self.others if each.is_ready]
        found = await asyncio.gather(*map(ask, others))
        return next((each for each, has_request in zip(others, found, strict=True) if has_request), None)

    async def summary(self, poll: Poll) -> Summary:
        """Return the answer to the poll of another replica."""
        health = await self._local_ready()
        return self.served.summary(poll, health.state, health.error_msg, self._load(poll.front_end))

    def _load(self, front_end: str) -> Load:
        """Return the load of this server without the requests of one front end, which counts them itself. The poll is
        answered by the gateway because the state of the model is older and does not tell whose requests are open."""
        load = self.served.load(besides=front_end) + Load(self._num_unattended)
        return load if front_end == self._front_end else load + self.local.own_load

    async def _check_local(self) -> HealthStatus:
        health = await check_model(self.local.backend)
        if health.state:  # background responses are not followed by a front end
            num_attended = (self.served.load() + self.local.own_load).num_open
            self._num_unattended = max(0, health.state.num_open - num_attended)
        return health

    async def _watch(self) -> None:
        while True:
            if self.has_model:
                health = await self._local_ready()
                self.local.state, self.local.reason = health.state, health.error_msg
                self.local.host = next((each.host for each, _ in self._remote.values() if each.is_self), "")
            self.hand_over()
            await asyncio.sleep(POLL_EVERY_S / 2)

    def hand_over(self) -> None:
        """Let the requests of replicas that are being stopped continue where the arithmetic is the same, and where
        their cached blocks can be had."""
        replicas = (self.local, *self.others)
        ready = {each.arithmetic for each in replicas if each.is_ready}
        for each in replicas:
            if each.state and each.state.is_stopping and each.cached_at and each.arithmetic in ready:
                each.hand_over()

    def with_source(
        self, body: dict[str, Any], keys: PromptKeys, replica: Replica, stopped: Replica | None
    ) -> dict[str, Any]:
        """Return a request for `replica` with the address of the replica whose cached blocks it may pull: `stopped`,
        which has handed it over, or the one that knows most of its prompt. Without one, return `body`."""
        alike = [
            each for each in (self.local, *self.others) if each.cached_at and each.arithmetic == replica.arithmetic
        ]
        source = max(
            alike, key=lambda each: (each is stopped, each.known.count(keys.chain), each is replica), default=None
        )
        if source is None or source is replica or not replica.cached_at:
            return body
        if source is not stopped and not source.known.count(keys.chain):
            return body
        return with_owner(body, replace(owner_of(body), cached_at=source.cached_at))

    async def _resolve(self) -> None:
        while True:
            found: dict[Address, str] = {}  # with the names that were resolved
            for host, port in self._addresses:
                try:
                    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                    found |= {(str(info[4][0]), port): host for info in infos}
                except OSError as error:
                    log.warning("REPLICAS: %s cannot be resolved: %s", host, error)
                    found |= {address: host for address in self._remote if address[1] == port}
            for address in found.keys() - self._remote.keys():
                replica = self._new_replica(address, found[address])
                self._remote[address] = replica, asyncio.create_task(replica.watch(self.served.identity))
            for address in self._remote.keys() - found.keys():
                replica, task = self._remote.pop(address)
                task.cancel()
                replica.lose("REPLICAS does not have it any more")
            await asyncio.sleep(RESOLVE_EVERY_S)
