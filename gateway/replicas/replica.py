"""One replica as a front end sees it: its state, its load, and the answers that it is generating."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.placement import KnownPrefixes
from engine.wire import STORE, Delta, ModelState, owner_of
from gateway.backend import Backend, HandedOver, ModelLost
from gateway.replicas.placement import PromptKeys, num_uncached_tokens
from gateway.replicas.served import NO_LOAD, Load

log = logging.getLogger(__name__)

UNMOVABLE_FIELDS = (STORE, "lora_name", "use_beam_search", "best_of")  # fields of requests that are not handed over


@dataclass(eq=False)
class OpenRequest:
    """A request that this front end has sent to a replica."""

    owner: str  # name
    num_tokens: int  # about how many tokens of the prompt are to be computed; 0 after the first answer
    inbox: asyncio.Queue[Delta | Exception]
    can_move: bool  # without a loss, see `Replica.hand_over`


class Arithmetic(NamedTuple):
    """Model and rounding, on which an answer depends beside its request."""

    model: str  # its hash
    fingerprint: int  # of the engine, see `engine.executors.fingerprint`


class Replica:
    """A server of the model. `make_backend` connects to it; `identity` is the same for all front ends."""

    def __init__(self, name: str, make_backend: Callable[[], Backend]):
        self.name = name
        self.identity = b""
        self.known = KnownPrefixes()
        self.state: ModelState | None = None  # None: it does not answer
        self.reason = "it has not answered yet"
        self._make_backend = make_backend
        self.backend = make_backend()
        self.host = ""  # by which other replicas can reach it; empty: unknown
        self._open: dict[OpenRequest, None] = {}  # in the order of their arrival
        self.load_elsewhere = NO_LOAD  # of other front ends: at the last poll, or now if it is this server
        # Requests of this front end: sent to it; sent to another replica after a loss; continued here although another
        # fingerprint had begun them
        self.num_requests = self.num_lost = self.num_inexact = 0

    @property
    def is_ready(self) -> bool:
        """Return whether the model of the replica answers."""
        return self.state is not None and self.state.ready

    @property
    def model(self) -> str:
        """Return the hash of the replica's model."""
        return self.state.model_hash if self.state else ""

    @property
    def arithmetic(self) -> Arithmetic:
        """Return what the answers of the replica depend on."""
        return Arithmetic(self.model, self.state.fingerprint if self.state else 0)

    @property
    def cached_at(self) -> str:
        """Return host:port where other replicas get its cached blocks, or an empty text."""
        return f"{self.host}:{self.state.cache_port}" if self.host and self.state and self.state.cache_port else ""

    @property
    def own_load(self) -> Load:
        """Return the load of the requests of this front end, now."""
        return Load(len(self._open), sum(each.num_tokens for each in self._open))

    @property
    def num_running(self) -> int:
        """Return the number of open requests of all front ends, as far as this one knows."""
        return self.load_elsewhere.num_open + len(self._open)

    @property
    def num_queued_tokens(self) -> int:
        """Return about how many tokens of prompts wait, of all front ends, as far as this one knows."""
        return self.load_elsewhere.num_queued_tokens + self.own_load.num_queued_tokens

    def usage_of(self, owner: str) -> tuple[int, float]:
        """Return the open requests of an owner, of all front ends at the last poll or of this one now, and the tokens
        of about the last minute.
        """
        num_open, num_tokens = self.state.usage.get(owner, (0, 0.0)) if self.state else (0, 0.0)
        return max(num_open, sum(each.owner == owner for each in self._open)), num_tokens

    def generate(self, body: dict[str, Any], keys: PromptKeys, timeout_s: float) -> AsyncGenerator[Delta, None]:
        """Return the answers of this replica. Raise ModelLost as soon as the replica is lost. What is to be computed of
        the prompt is counted now, because the keys of a request to this server are known as soon as it is recorded."""
        num_tokens, can_move = num_uncached_tokens(keys, self.known), not any(map(body.get, UNMOVABLE_FIELDS))
        opened = OpenRequest(owner_of(body).name, num_tokens, asyncio.Queue(), can_move)
        return self._answers(opened, body, keys, timeout_s)

    async def _answers(
        self, opened: OpenRequest, body: dict[str, Any], keys: PromptKeys, timeout_s: float
    ) -> AsyncGenerator[Delta, None]:
        reading = asyncio.create_task(_read(self.backend, body, timeout_s, opened.inbox))
        self._open[opened] = None
        self.num_requests += 1
        try:
            while True:
                answer = await opened.inbox.get()
                if isinstance(answer, Exception):
                    raise answer
                if opened.num_tokens:
                    self._record_first_answer(opened, keys, answer)
                yield answer
                if answer.is_end:
                    await reading  # a stream to tritonserver must end by itself
                    return
        finally:
            self._open.pop(opened, None)
            reading.cancel()

    def _record_first_answer(self, opened: OpenRequest, keys: PromptKeys, answer: Delta) -> None:
        opened.num_tokens = 0
        if answer.usage.cached_tokens == 0:  # it has evicted them
            self.known.discard(keys.chain)
        self.known.add(keys.chain)

    def lose(self, reason: str) -> None:
        """End all requests of this front end with ModelLost, and connect anew."""
        self.state, self.reason = None, reason
        for each in self._open:
            each.inbox.put_nowait(ModelLost(f"the replica {self.name} is lost: {reason}"))
        self._closing = asyncio.ensure_future(self.backend.close())
        self.backend = self._make_backend()

    def hand_over(self) -> None:
        """End the requests of this front end with HandedOver, but for those that another replica might not continue
        after their last token."""
        moved = [each for each in self._open if each.can_move]
        if moved:
            log.info("%s is stopping and hands its requests over: %d", self.name, len(moved))
        for each in moved:
            each.inbox.put_nowait(HandedOver(f"{self.name} is stopping"))

    def suspend(self, reason: str) -> None:
        """Send no requests until the next poll has been answered."""
        self.state, self.reason = None, reason


async def _read(backend: Backend, body: dict[str, Any], timeout_s: float, inbox: asyncio.Queue[Any]) -> None:
    try:
        async with contextlib.aclosing(backend.generate(body, timeout_s)) as answers:
            async for answer in answers:
                inbox.put_nowait(answer)
    except Exception as error:
        inbox.put_nowait(error)
