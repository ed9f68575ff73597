"""Id of an HTTP request: the client's `X-Request-Id`, or that of the answer. It is returned in a header and logged."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from engine.errors import DuplicateRequest, InvalidRequest
from engine.wire import MAX_REQ_ID_LEN, Delta, StoredResponse, shown
from gateway.protocol import Exchange, RequestContext
from gateway.retry import RetryingBackend

HEADER = "X-Request-Id"
VISIBLE_ASCII = re.compile(f"[!-~]{{1,{MAX_REQ_ID_LEN}}}")
LONGEST_NAME = MAX_REQ_ID_LEN - 16  # leaves room for a suffix and the index of a prompt


def request_id_of(context: RequestContext) -> str:
    """Return the client's id, or a random one if there is none that a header and a log line can carry."""
    given = context.headers.get(HEADER, "")
    return given if VISIBLE_ASCII.fullmatch(given) else uuid.uuid4().hex


def given_id(context: RequestContext) -> str:
    """Return the id that the client's header chooses, or an empty string. Raise InvalidRequest if it is unusable."""
    given = context.headers.get(HEADER, "")
    if len(given) > MAX_REQ_ID_LEN:
        text = "the header `{field}` has {value} characters, the limit is {limit}"
        raise InvalidRequest(text, field=HEADER, value=len(given), limit=MAX_REQ_ID_LEN)
    if given and not VISIBLE_ASCII.fullmatch(given):
        text = "the header `{field}` must be visible ASCII without spaces, it is {value}"
        raise InvalidRequest(text, field=HEADER, value=shown(given))
    return given


def take_answer_id(context: RequestContext, exchange: Exchange) -> None:
    """Make the id of the answer that of the request, unless a header or a log line cannot carry it."""
    if VISIBLE_ASCII.fullmatch(exchange.answer_id):
        context.request_id = exchange.answer_id


class UniqueIdBackend:
    """Sends requests under the id in the client's header, with a suffix if another open request has the same id."""

    def __init__(self, backend: RetryingBackend, context: RequestContext, exchange: Exchange):
        self._backend, self._context, self._exchange = backend, context, exchange
        self._name = f"{context.given_id[:LONGEST_NAME]}-{uuid.uuid4().hex[:8]}"

    async def generate(self, index: int, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[Delta, None]:
        """Yield the answers to `exchange.requests[index]`.

        A client that resumes an answer needs exactly its id, so no suffix is added then.
        """
        is_named = not self._context.given_id or body.get("resume_from") is not None
        while True:
            try:
                async with contextlib.aclosing(self._backend.generate(body, timeout_s)) as answers:
                    async for answer in answers:
                        is_named = True
                        yield answer
                return
            except DuplicateRequest:
                if is_named:
                    raise
                is_named, body = True, {**body, "req_id": self._rename(index)}

    async def begin_in_background(self, body: dict[str, Any], timeout_s: float) -> StoredResponse:
        """Start a background response. A suffix is added to the header's id if that is in use."""
        try:
            return await self._backend.stored_response(body, timeout_s)
        except DuplicateRequest:
            if not self._context.given_id:
                raise
            return await self._backend.stored_response({**body, "req_id": self._rename(0)}, timeout_s)

    def _rename(self, index: int) -> str:
        if not self._context.has_begun:
            self._exchange.answer_id = self._context.request_id = self._name
        return self._name if len(self._exchange.requests) == 1 else f"{self._name}-{index}"
