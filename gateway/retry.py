"""Requests outlive the model server: one whose stream breaks is asked again when the server is back, and goes on after
what has come. While the model is changed for another, new ones wait; of two models nobody gets one answer. Knows the
wire's fields, not how the model is reached."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from engine.errors import EngineUnavailable
from engine.settings.served import ServedModel
from engine.wire import Aborted, Delta, Detokenized, Loras, ModelState, Owner, StoredResponse, Tokenized, parse_request
from gateway.backend import COMING_BACK_S, Backend, ModelLost, ModelUnreachable
from gateway.health import CachedHealthCheck

log = logging.getLogger(__name__)

T = TypeVar("T")
LOOK_EVERY_S = 0.1
MAX_LOSSES = 3  # in a row: a request without a new answer for so long may be the one that ends the server


class RetryingBackend:
    """A `gateway.backend.Backend` around another. `ready` says whether the model can be asked, `served` which it is."""

    def __init__(self, backend: Backend, ready: CachedHealthCheck, served: ServedModel):
        self._backend = backend
        self._ready = ready
        self._served = served

    async def generate(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[Delta, None]:
        known, asked, patience = ReceivedTokens(), body, RetryPolicy(self._ready, self._served, timeout_s)
        while True:
            await patience.wait_for_turn(known)
            try:
                async with contextlib.aclosing(self._backend.generate(asked, timeout_s)) as answers:
                    async for answer in answers:
                        patience.was_answered()
                        known.add(answer)
                        yield answer
                return
            except EngineUnavailable as error:
                await patience.wait(error, known)
                asked = known.rest(body)

    async def probe(self, with_metrics: bool = False) -> ModelState:
        return await self._backend.probe(with_metrics)

    async def lora_names(self, timeout_s: float) -> Sequence[str]:
        """A server that has just died is waited for: without it nobody knows them."""
        return (await self._patiently(self._backend.probe, timeout_s)).loras or ()

    async def stored_response(self, body: dict[str, Any], timeout_s: float) -> StoredResponse:
        """Ask again when the server has died: a response that it has stored is lost, one that begins is not."""
        return await self._patiently(partial(self._backend.stored_response, body), timeout_s)

    async def _patiently(self, ask: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        patience = RetryPolicy(self._ready, self._served, timeout_s)
        while True:
            try:
                return await ask()
            except EngineUnavailable as error:
                await patience.wait(error, ReceivedTokens())
                await patience.wait_for_turn(ReceivedTokens())

    async def abort(self, req_id: str, owner: Owner) -> Aborted:
        return await self._backend.abort(req_id, owner)

    async def about_tokens(self, question: dict[str, Any]) -> Tokenized | Detokenized:
        return await self._backend.about_tokens(question)

    async def change_loras(self, question: dict[str, Any], owner: Owner) -> Loras:
        return await self._backend.change_loras(question, owner)

    async def is_live(self) -> bool:
        return await self._backend.is_live()

    async def close(self) -> None:
        await self._backend.close()


class RetryPolicy:
    """Of one request, with a model server that it has lost: for how long and how often."""

    def __init__(self, ready: CachedHealthCheck, served: ServedModel, timeout_s: float):
        self._ready = ready
        self._served = served
        self._model_id = ""  # of the one that is asked
        self._timeout_s = timeout_s
        self._num_losses = 0
        self._deadline = 0.0

    def was_answered(self) -> None:
        self._num_losses = 0

    async def wait_for_turn(self, known: ReceivedTokens) -> None:
        """Before the model is asked: new requests wait for the next model while the one of now ends what it has begun,
        which only itself can go on with. Raises EngineUnavailable."""
        if known:
            if self._served.now().id != self._model_id:
                raise EngineUnavailable("the model was changed for another before the answer had its end")
            return
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout_s
        while (served := self._served.now()).is_changing:
            if clock() >= deadline:
                raise EngineUnavailable("the model is being changed for another, which takes long")
            await asyncio.sleep(LOOK_EVERY_S)
        self._model_id = served.id

    def is_between_models(self, known: ReceivedTokens) -> bool:
        """Too late for the one, too early for the other."""
        return not known and self._served.now().is_changing

    async def wait(self, error: EngineUnavailable, known: ReceivedTokens) -> None:
        """Until the model can be asked again, or for the timeout: whoever asks then is told what is wrong. Raises
        `error` when it is in vain, or when nothing was lost."""
        if self.is_between_models(known):
            return
        if not isinstance(error, ModelUnreachable):
            raise error
        clock = asyncio.get_running_loop().time
        if isinstance(error, ModelLost):
            log.warning("the model server has lost a request, which will be asked again: %s", error)
            self._num_losses, self._deadline = self._num_losses + 1, clock() + self._timeout_s
        elif error.was_there and not self._deadline:
            self._deadline = clock() + min(self._timeout_s, COMING_BACK_S)
        if self._num_losses > MAX_LOSSES or clock() >= self._deadline:
            raise error
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if (await self._ready()).state or clock() >= self._deadline:
                return


class ResponseTokens(Protocol):
    """What there is to know of a response."""

    @property
    def index(self) -> int: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def infer_seed(self) -> int | None: ...


class ReceivedTokens:
    """What has come of the answers to a request."""

    def __init__(self) -> None:
        self._ids: defaultdict[int, list[int]] = defaultdict(list)  # of each answer, those that came here
        self._seed: int | None = None  # of the first answer

    def __bool__(self) -> bool:
        return any(self._ids.values())

    def add(self, answer: ResponseTokens) -> None:
        self._ids[answer.index] += answer.token_ids
        if answer.index == 0:
            self._seed = answer.infer_seed

    def rest(self, body: dict[str, Any]) -> dict[str, Any]:
        """The request for what has not come, in the wire's fields. Raises InvalidRequest if the model would."""
        request = parse_request(body)
        begins = request.resume_from or (0,) * request.n
        before = request.answer_ids or ((),) * request.n
        came = [self._ids[index] for index in range(request.n)]
        rest = {**body, "resume_from": [begin + len(ids) for begin, ids in zip(begins, came, strict=True)]}
        if all(len(ids) >= begin for ids, begin in zip(before, begins, strict=True)):  # else a part is unknown
            known = zip(before, begins, came, strict=True)
            rest["answer_ids"] = [[*ids[:begin], *new] for ids, begin, new in known]
        if request.infer_seed is None and self._seed is not None:
            rest["infer_seed"] = self._seed
        return rest
