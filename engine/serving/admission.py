"""Who is let in: bounded by bytes before a request is read, by requests and tokens before it is tokenized, and by what
its owner may have open."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.errors import InvalidRequest, queue_full, tokens_full
from engine.link.client import EngineClient
from engine.serving.accounts import Account, Accounts
from engine.serving.open_replies import OpenReplies
from engine.serving.options import ServiceOptions
from engine.serving.reply import Reply
from engine.wire import Owner


class Admission:
    """Thread-safe."""

    def __init__(self, client: EngineClient, replies: OpenReplies, options: ServiceOptions):
        self.accounts = Accounts()
        self._client = client
        self._replies = replies
        self._options = options
        self._num_unread = 0  # requests that wait for a thread to read them
        self._lock = threading.Lock()

    def take(self, payload: bytes, is_urgent: bool = False) -> None:
        """Counts it as unread, until `was_read`; a full server takes what is urgent. Raises RequestError."""
        limit = self._options.max_body_bytes
        if len(payload) > limit:
            text = "The request has {value} bytes, at most MAX_BODY_BYTES({limit}) are taken"
            raise InvalidRequest(text, value=len(payload), limit=limit)
        with self._lock:
            if not is_urgent:
                self.check_room(self._num_unread)
            self._num_unread += 1

    def was_read(self) -> None:
        with self._lock:
            self._num_unread -= 1

    def check_room(self, num_unread: int = 0) -> None:
        """Before time goes into a request that the engine would refuse: into reading it, and into its tokens."""
        num_waiting = len(self._replies) + num_unread - self._options.max_running
        if num_waiting >= self._options.max_waiting:
            raise queue_full(num_waiting, self._options.max_waiting)
        num_tokens = self._client.stats.get("num_waiting_tokens", 0)
        if num_tokens >= self._options.max_waiting_tokens:
            raise tokens_full(num_tokens, self._options.max_waiting_tokens)

    def enter(self, owner: Owner, make: Callable[[Account], Reply]) -> Reply:
        """With the request counted as its owner's, until it ends or is refused. It is open then."""
        account = self.accounts.of(owner)
        account.enter(owner)
        try:
            reply = make(account)
            self._replies.add(reply)
        except BaseException:
            account.leave()
            raise
        account.charge(len(reply.prompt.token_ids), 0)
        return reply
