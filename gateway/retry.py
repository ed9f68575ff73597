"""Retries of requests whose model server dies.

A broken request is sent again when the server is back, and continues after the tokens that were received.

While the model is reloaded new requests wait, and an answer never mixes tokens of two models. The module uses the
fields of the wire and does not depend on how the model is reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from engine.errors import EngineUnavailable
from engine.settings.served import ServedModel
from engine.wire import (
    Aborted,
    Delta,
    DetokenizeResponse,
    LoraList,
    ModelState,
    Owner,
    StoredResponse,
    TokenizeResponse,
    parse_request,
)
from gateway.backend import RESTART_WITHIN_S, Backend, ModelLost, ModelUnreachable
from gateway.health import CachedHealthCheck

log = logging.getLogger(__name__)

T = TypeVar("T")
CHECK_EVERY_S = 0.1
MAX_LOSSES = 3  # in a row; a request that loses more servers without a new answer may be the cause of the crashes


class RetryingBackend:
    """Backend (`gateway.backend.Backend`) that retries the requests of another one.

    `ready` checks whether the model answers, `served` says which model it is.
    """

    def __init__(self, backend: Backend, ready: CachedHealthCheck, served: ServedModel):
        self._backend = backend
        self._ready = ready
        self._served = served

    async def generate(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[Delta, None]:
        """Yield the answers to one request, across restarts of the model server."""
        received_tokens, asked, policy = ReceivedTokens(), body, RetryPolicy(self._ready, self._served, timeout_s)
        while True:
            await policy.wait_for_turn(received_tokens)
            try:
                async with contextlib.aclosing(self._backend.generate(asked, timeout_s)) as answers:
                    async for answer in answers:
                        policy.record_answer()
                        yield received_tokens.add(answer)
                return
            except EngineUnavailable as error:
                await policy.wait(error, received_tokens)
                asked = received_tokens.rest(body)

    async def probe(self, with_metrics: bool = False) -> ModelState:
        return await self._backend.probe(with_metrics)

    async def lora_names(self, timeout_s: float) -> Sequence[str]:
        """Return the names of the loaded adapters. If the server has just died, wait until it is back."""
        return (await self._with_retries(self._backend.probe, timeout_s)).loras or ()

    async def stored_response(self, body: dict[str, Any], timeout_s: float) -> StoredResponse:
        """Return a stored response, and ask again if the server has died.

        A response that it had stored is lost then, one that begins is not.
        """
        return await self._with_retries(partial(self._backend.stored_response, body), timeout_s)

    async def _with_retries(self, ask: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        policy = RetryPolicy(self._ready, self._served, timeout_s)
        while True:
            try:
                return await ask()
            except EngineUnavailable as error:
                await policy.wait(error, ReceivedTokens())
                await policy.wait_for_turn(ReceivedTokens())

    async def abort(self, req_id: str, owner: Owner) -> Aborted:
        return await self._backend.abort(req_id, owner)

    async def tokenize_or_detokenize(self, body: dict[str, Any]) -> TokenizeResponse | DetokenizeResponse:
        return await self._backend.tokenize_or_detokenize(body)

    async def change_loras(self, body: dict[str, Any], owner: Owner) -> LoraList:
        return await self._backend.change_loras(body, owner)

    async def is_live(self) -> bool:
        return await self._backend.is_live()

    async def close(self) -> None:
        await self._backend.close()


class RetryPolicy:
    """Retry state of one request: how often its model server died, and how long to wait for the next one."""

    def __init__(self, ready: CachedHealthCheck, served: ServedModel, timeout_s: float):
        self._ready = ready
        self._served = served
        self._model_id = ""  # id of the model that answers this request
        self._timeout_s = timeout_s
        self._num_losses = 0
        self._deadline = 0.0

    def record_answer(self) -> None:
        """Reset the number of consecutive losses."""
        self._num_losses = 0

    async def wait_for_turn(self, received_tokens: ReceivedTokens) -> None:
        """Wait until the model may be asked.

        New requests wait for the next model during a reload. Raise EngineUnavailable if the model was replaced after a
        part of the answer was received, or if the reload takes too long.
        """
        if received_tokens:
            if self._served.now().id != self._model_id:
                raise EngineUnavailable("the model was replaced by a reload before the answer was complete")
            return
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout_s
        while (served := self._served.now()).is_changing:
            if clock() >= deadline:
                raise EngineUnavailable("the model is still being reloaded; retry later")
            await asyncio.sleep(CHECK_EVERY_S)
        self._model_id = served.id

    def is_between_models(self, received_tokens: ReceivedTokens) -> bool:
        """Return True if a request that has received nothing arrived during a reload: too late for the old model and
        too early for the new one.
        """
        return not received_tokens and self._served.now().is_changing

    async def wait(self, error: EngineUnavailable, received_tokens: ReceivedTokens) -> None:
        """Wait until the model answers again or the timeout has passed; then the caller tries again.

        Raise `error` if a retry is useless or if nothing was lost.
        """
        if self.is_between_models(received_tokens):
            return
        if not isinstance(error, ModelUnreachable):
            raise error
        clock = asyncio.get_running_loop().time
        if isinstance(error, ModelLost):
            log.warning("the model server died during a request, which is sent again: %s", error)
            self._num_losses, self._deadline = self._num_losses + 1, clock() + self._timeout_s
        elif error.was_seen_recently and not self._deadline:
            self._deadline = clock() + min(self._timeout_s, RESTART_WITHIN_S)
        if self._num_losses > MAX_LOSSES or clock() >= self._deadline:
            raise error
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if (await self._ready()).state or clock() >= self._deadline:
                return


class ReceivedTokens:
    """Tokens that have been received of the answers to one request."""

    def __init__(self) -> None:
        self._ids: defaultdict[int, list[int]] = defaultdict(list)  # received tokens by index of the answer
        self._num_cached: dict[int, int] = {}  # cached tokens of the prompt by index of the answer, if known
        self._seed: int | None = None  # seed of the first answer

    def __bool__(self) -> bool:
        return any(self._ids.values())

    def add(self, answer: Delta) -> Delta:
        """Record the tokens of one response and return it.

        A model that continues an answer does not know how much of the prompt was cached when it began; the returned
        response has the number that was received then.
        """
        self._ids[answer.index] += answer.token_ids
        if answer.index == 0:
            self._seed = answer.infer_seed
        usage = answer.usage
        if usage.cached_tokens is not None:
            self._num_cached.setdefault(answer.index, usage.cached_tokens)
        elif (num_cached := self._num_cached.get(answer.index)) is not None:
            return structs.replace(answer, usage=usage._replace(cached_tokens=num_cached))
        return answer

    def rest(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the request for the tokens that are missing, in the wire's fields.

        Raise InvalidRequest if the model would.
        """
        request = parse_request(body)
        begins = request.resume_from or (0,) * request.n
        before = request.answer_ids or ((),) * request.n
        received = [self._ids[index] for index in range(request.n)]
        rest = {**body, "resume_from": [begin + len(ids) for begin, ids in zip(begins, received, strict=True)]}
        if all(len(ids) >= begin for ids, begin in zip(before, begins, strict=True)):  # else some are unknown
            parts = zip(before, begins, received, strict=True)
            rest["answer_ids"] = [[*ids[:begin], *new] for ids, begin, new in parts]
        if request.infer_seed is None and self._seed is not None:
            rest["infer_seed"] = self._seed
        return rest
