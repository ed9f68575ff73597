"""Record of the requests that the model of this server has computed, which the other replicas ask for.

The answer to a poll has the keys of new prompts since the previous poll, and the state of the model.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from typing import Any

import msgspec

from engine.placement import KnownPrefixes
from engine.wire import ModelState, owner_of
from gateway.replicas.placement import PromptKeys, prompt_keys

MAX_NEWS = 1 << 14  # keys that a replica may miss before it gets all of them
MAX_REQUESTS = 1 << 16  # ids that are remembered


class Poll(msgspec.Struct, frozen=True):
    """Question of a front end to another replica."""

    identity: bytes = b""  # of the replica at the previous poll
    since: int = 0  # number of its keys that are known
    find: tuple[str, str] | None = None  # owner and req_id of a request


class Summary(msgspec.Struct, frozen=True):
    """Answer to a Poll."""

    identity: bytes  # random, another one for each process
    state: ModelState | None  # None: the model does not answer
    reason: str = ""  # why the model does not answer
    num_keys: int = 0  # added so far
    keys: list[bytes] = []  # the new ones
    is_all: bool = False  # `keys` are all keys: the earlier ones are forgotten
    has_request: bool = False  # whether this replica has computed the request in `find`


class ServedRequests:
    """Requests that this server has computed, and the prefixes of their prompts."""

    def __init__(self) -> None:
        self.identity = secrets.token_bytes(8)
        self.known = KnownPrefixes()
        self._news: deque[bytes] = deque(maxlen=MAX_NEWS)
        self._num_keys = 0
        self._requests: OrderedDict[tuple[str, str], None] = OrderedDict()

    def note(self, body: dict[str, Any], keys: PromptKeys | None = None) -> None:
        """Record a request that is sent to the model of this server."""
        if not isinstance(req_id := body.get("req_id"), str):
            return  # a probe or another question
        new = self.known.add((keys or prompt_keys(body)).chain)
        self._news += new
        self._num_keys += len(new)
        self._requests[owner_of(body).name, req_id] = None
        self._requests.move_to_end((owner_of(body).name, req_id))
        if len(self._requests) > MAX_REQUESTS:
            self._requests.popitem(last=False)

    def has(self, owner: str, req_id: str) -> bool:
        """Return whether the model of this server has been sent this request."""
        return (owner, req_id) in self._requests

    def summary(self, poll: Poll, state: ModelState | None, reason: str) -> Summary:
        """Return the answer to a poll."""
        num_new = self._num_keys - poll.since
        is_all = poll.identity != self.identity or not 0 <= num_new <= len(self._news)
        keys = list(self.known) if is_all else list(self._news)[len(self._news) - num_new :]
        has_request = poll.find is not None and self.has(*poll.find)
        return Summary(self.identity, state, reason, self._num_keys, keys, is_all, has_request)


read_poll = msgspec.msgpack.Decoder(Poll).decode
read_summary = msgspec.msgpack.Decoder(Summary).decode
write = msgspec.msgpack.Encoder().encode
