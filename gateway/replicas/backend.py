"""Backend over several replicas: a request is placed on one of them, and continues on another one if that is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import msgspec

from engine.errors import EngineUnavailable, Overloaded, RequestError, UnknownAnswer
from engine.wire import (
    STORE,
    Aborted,
    Delta,
    DetokenizeResponse,
    LoraList,
    ModelState,
    Owner,
    StoredResponse,
    TokenizeResponse,
    owner_of,
    with_owner,
)
from gateway.backend import RESTART_WITHIN_S, HandedOver, ModelLost, ModelUnreachable, timeout
from gateway.replicas.metrics import samples
from gateway.replicas.placement import prompt_keys
from gateway.replicas.replica import Arithmetic, Replica
from gateway.replicas.replica_set import ReplicaSet
from gateway.retry import MAX_LOSSES, ReceivedTokens

log = logging.getLogger(__name__)

CHECK_EVERY_S = 0.1
ABORT_WITHIN_S = 5.0  # longest wait for a replica that does not answer


class ReplicatedBackend:
    """Backend (`gateway.backend.Backend`) over the replicas of a ReplicaSet."""

    def __init__(self, replicas: ReplicaSet):
        self.replicas = replicas

    async def generate(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[Delta, None]:
        """Yield the answers to one request. After a loss the next replica continues after the last token."""
        request = _PlacedRequest(self.replicas, with_seed(body), timeout_s)
        while True:
            replica = await request.next_replica()
            rest = self.replicas.with_source(request.rest, request.keys, replica, request.stopped)
            answers = replica.generate(self.replicas.with_usage(rest, replica), request.keys, timeout_s)
            if replica is self.replicas.local:
                self.replicas.served.note(body, request.keys)
            try:
                async with contextlib.aclosing(answers):
                    async for answer in answers:
                        yield request.record_answer(answer)
                return
            except (EngineUnavailable, Overloaded) as error:
                request.record_refusal(error, replica)

    async def probe(self, with_metrics: bool = False) -> ModelState:
        """Return the state of this server's model, or that of another replica if this server cannot answer."""
        state = None
        with contextlib.suppress(EngineUnavailable):
            if self.replicas.has_model:
                state = await self.replicas.local.backend.probe(with_metrics)
        others = [each.state for each in self.replicas.others if each.state and each.state.ready]
        if (state is None or not state.ready) and others:
            state = others[0]
        if state is None:
            reasons = "; ".join(f"{each.name}: {each.reason}" for each in self.replicas.others)
            problem = "no decode instance answers"
            if self.replicas.has_model:
                problem = "the model server does not answer, and no other replica does"
            raise ModelUnreachable(f"{problem} ({reasons or 'REPLICAS has no other server that can be found'})")
        if not with_metrics:
            return state
        return msgspec.structs.replace(state, metrics=[*(state.metrics or ()), *samples(self.replicas)])

    async def abort(self, req_id: str, owner: Owner) -> Aborted:
        """End an open request, whichever replica computes it. One that missed the last poll may compute it, too."""

        async def ask(replica: Replica) -> Aborted:
            with contextlib.suppress(EngineUnavailable, asyncio.TimeoutError):
                async with timeout(ABORT_WITHIN_S):
                    return await replica.backend.abort(req_id, owner)
            return Aborted(req_id, False)

        answers = await asyncio.gather(*map(ask, (self.replicas.local, *self.replicas.others)))
        return Aborted(req_id, any(answer.aborted for answer in answers))

    async def tokenize_or_detokenize(self, body: dict[str, Any]) -> TokenizeResponse | DetokenizeResponse:
        return await self._answering()[0].backend.tokenize_or_detokenize(body)

    async def change_loras(self, body: dict[str, Any], owner: Owner) -> LoraList:
        """Change the adapters of this server. Requests that name one are sent to replicas that have it."""
        return await self.replicas.local.backend.change_loras(body, owner)

    async def stored_response(self, body: dict[str, Any]) -> StoredResponse:
        """Return a stored response, whichever replica has it. A background response begins on this server."""
        unknown: RequestError = UnknownAnswer("there is no such response")
        for each in [self._answering()[0]] if STORE in body else self._answering():
            try:
                return await each.backend.stored_response(body)
            except (UnknownAnswer, EngineUnavailable) as error:
                unknown = unknown if isinstance(error, EngineUnavailable) else error
        raise unknown

    async def is_live(self) -> bool:
        return not self.replicas.has_model or await self.replicas.local.backend.is_live()

    async def close(self) -> None:
        await self.replicas.close()

    def _answering(self) -> list[Replica]:
        """Return the replicas that are ready, this server first; this server alone if none is."""
        ready = [each for each in (self.replicas.local, *self.replicas.others) if each.is_ready]
        return ready or [self.replicas.local]


class _PlacedRequest:
    """One request: the tokens that were received, and the replicas that may continue it."""

    def __init__(self, replicas: ReplicaSet, body: dict[str, Any], timeout_s: float):
        self.keys = prompt_keys(body)
        self.rest = body  # the request for the tokens that are missing
        self._replicas, self._body, self._timeout_s = replicas, body, timeout_s
        self._received = ReceivedTokens()
        self._begun: Arithmetic | None = None  # of the last answer that was received
        self._chosen = replicas.local.arithmetic  # of the last replica
        self._full: list[Replica] = []  # replicas
        self._num_losses = 0
        self.stopped: Replica | None = None  # the replica that has handed the request over
        self._error: RequestError = EngineUnavailable("no replica of the model is ready; retry later")
        self._may_be_known = self._is_resumed
        self._deadline = asyncio.get_running_loop().time() + min(timeout_s, RESTART_WITHIN_S)

    @property
    def _is_resumed(self) -> bool:
        return self._body.get("resume_from") is not None or bool(self._body.get(STORE, {}).get("is_background"))

    async def next_replica(self) -> Replica:
        """Return the replica for the rest of the request. Wait for one, or raise the error of the last one."""
        if self._may_be_known:
            self._may_be_known = False
            owner, req_id = owner_of(self._body).name, self._body.get("req_id")
            if isinstance(req_id, str) and (found := await self._replicas.find(owner, req_id)):
                return self._take(found)
        clock, lora = asyncio.get_running_loop().time, self._body.get("lora_name")
        while True:
            if replica := self._replicas.choose(self.keys, self._begun, self._full, lora):
                return self._take(replica)
            if isinstance(self._error, Overloaded) and not self._received or clock() >= self._deadline:
                raise self._error
            self._full.clear()
            await asyncio.sleep(CHECK_EVERY_S)

    def _take(self, replica: Replica) -> Replica:
        self._chosen = replica.arithmetic
        replica.num_inexact += self._begun not in (None, self._chosen)
        return replica

    def record_answer(self, answer: Delta) -> Delta:
        """Record an answer and return it (`ReceivedTokens.add`)."""
        self._begun = self._chosen
        self._num_losses = 0
        return self._received.add(answer)

    def record_refusal(self, error: EngineUnavailable | Overloaded, replica: Replica) -> None:
        """Prepare the request for the next replica. Raise `error` if the request itself may be the cause."""
        self._num_losses += isinstance(error, ModelLost)
        is_over_limit = isinstance(error, Overloaded) and error.retry_after_s is not None  # of its owner
        if error.field is not None or is_over_limit or self._num_losses > MAX_LOSSES:
            raise error
        if isinstance(error, Overloaded):
            self._full.append(replica)
        elif isinstance(error, HandedOver):
            self.stopped = replica
        else:
            replica.suspend(str(error))
            replica.num_lost += 1
            log.warning("%s: a request is sent to another replica: %s", replica.name, error)
        if self._received or isinstance(error, ModelLost):
            self._deadline = asyncio.get_running_loop().time() + self._timeout_s
        # Another kind of error, because the caller would wait for a server that restarts
        self._error = EngineUnavailable(str(error)) if isinstance(error, ModelUnreachable) else error
        if self._received or self._is_resumed:
            self.rest = self._received.rest(self._body)
        if self._received:  # it has been admitted, so the limits of its owner must not end it
            self.rest = with_owner(self.rest, replace(owner_of(self.rest), max_requests=None, tokens_per_minute=None))


def with_seed(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request with a seed, if it has none, so that every replica gives the same answer. The seed follows
    from `req_id`, so that a client that resumes its answer at another front end gets the same seed.
    """
    req_id = body.get("req_id")
    if body.get("infer_seed") is not None or body.get("seed") is not None or not isinstance(req_id, str):
        return body
    digest = blake2b(req_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return {**body, "infer_seed": int.from_bytes(digest, "little") >> 1}
