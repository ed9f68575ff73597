"""Admission control: limits the bytes of a request before it is parsed, the number of waiting requests and tokens
before it is tokenized, and the open requests and tokens per minute of its owner."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.errors import InvalidRequest, queue_full, tokens_full
from engine.serving.open_replies import OpenReplies
from engine.serving.options import ServiceOptions
from engine.serving.rate_limits import OwnerUsage, RateLimiter
from engine.serving.reply import Reply
from engine.wire import Owner

if TYPE_CHECKING:
    from engine.link.engine_set import Engines

# The gateway limits what clients send to MAX_BODY_BYTES. The model receives more: ids, the owner, defaults, and schemas
# of tools once more, as a grammar.
MOST_COPIES, ADDED_BYTES = 2, 64 << 10


class Admission:
    """Admits requests to the service or raises the error that refuses them. Thread-safe."""

    def __init__(self, client: Engines, replies: OpenReplies, options: ServiceOptions):
        self.rate_limiter = RateLimiter()
        self._client = client
        self._replies = replies
        self._options = options
        self._num_unparsed = 0  # requests that wait for a parser thread
        self._lock = threading.Lock()

    def take(self, payload: bytes, is_urgent: bool = False) -> None:
        """Check size and queue limits and count the request as unparsed until `mark_parsed`. Urgent requests are
        accepted by a full server, too. Raises RequestError."""
        limit = MOST_COPIES * self._options.max_body_bytes + ADDED_BYTES
        if len(payload) > limit:
            text = "The request has {value} bytes with what the gateway has added, at most {limit} are taken"
            raise InvalidRequest(text, value=len(payload), limit=limit)
        with self._lock:
            if not is_urgent:
                self.check_room(self._num_unparsed)
            self._num_unparsed += 1

    def mark_parsed(self) -> None:
        """Count one request less as waiting for a parser thread."""
        with self._lock:
            self._num_unparsed -= 1

    def mark_waiting(self) -> None:
        """Count one request more as unparsed until `mark_parsed`, because its images have to be read first."""
        with self._lock:
            self._num_unparsed += 1

    def check_room(self, num_unparsed: int = 0) -> None:
        """Raise Overloaded if the engine would refuse another request, so that no time is spent on parsing and
        tokenizing it."""
        num_waiting = len(self._replies) + num_unparsed - self._options.max_running
        if num_waiting >= self._options.max_waiting:
            raise queue_full(num_waiting, self._options.max_waiting)
        num_tokens = self._client.stats.get("num_waiting_tokens", 0)
        if num_tokens >= self._options.max_waiting_tokens:
            raise tokens_full(num_tokens, self._options.max_waiting_tokens)

    def enter(self, owner: Owner, make: Callable[[OwnerUsage], Reply]) -> Reply:
        """Count the request as its owner's, build its reply with `make` and add it to the open replies. Raises
        RequestError, and counts nothing then."""
        owner_usage = self.rate_limiter.usage_of(owner)
        owner_usage.admit(owner)
        try:
            reply = make(owner_usage)
            self._replies.add(reply)
        except BaseException:
            owner_usage.release()
            raise
        owner_usage.charge(len(reply.prompt.token_ids), 0)
        return reply
