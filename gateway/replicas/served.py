"""Record of the requests that the model of this server has computed and computes, which the other replicas ask for.

The answer to a poll has the keys of new prompts since the previous poll, the state of the model and its load.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.placement import KnownPrefixes
from engine.wire import ModelState, owner_of, shared_of
from gateway.replicas.placement import PromptKeys, num_uncached_tokens, prompt_keys

MAX_NEWS = 1 << 14  # keys that a replica may miss before it gets all of them
MAX_REQUESTS = 1 << 16  # ids that are remembered


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Open requests, and about how many tokens of prompts are to be computed for those without a first answer."""

    num_open: int = 0
    num_queued_tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.num_open + other.num_open, self.num_queued_tokens + other.num_queued_tokens)


NO_LOAD = Load()


@dataclass(eq=False)
class ForwardedRequest:
    """An open request that another front end has sent to this server."""

    front_end: str  # its identity
    num_tokens: int  # about how many tokens of the prompt are to be computed; 0 after the first answer
    shared: tuple[str, int] | None = None  # name of the stream on which its answers arrive with others, and its tag


class Poll(msgspec.Struct, frozen=True):
    """Poll of another replica by a front end."""

    identity: bytes = b""  # of the replica at the previous poll
    since: int = 0  # number of its keys that are known
    find: tuple[str, str] | None = None  # owner and req_id of a request
    front_end: str = ""  # identity of the one that asks


class Summary(msgspec.Struct, frozen=True):
    """Answer to a Poll."""

    identity: bytes  # random, another one for each process
    state: ModelState | None  # None: the model does not answer
    reason: str = ""  # why the model does not answer
    num_keys: int = 0  # added so far
    keys: list[bytes] = []  # the new ones
    is_all: bool = False  # `keys` are all keys: the earlier ones are forgotten
    has_request: bool = False  # whether this replica has computed the request in `find`
    load: Load = NO_LOAD  # now, without the requests of the front end that asks


class ServedRequests:
    """Requests that this server has computed, and the prefixes of their prompts."""

    def __init__(self, identity: bytes = b"") -> None:
        self.identity = identity or secrets.token_bytes(8)
        self.known = KnownPrefixes()
        self._news: deque[bytes] = deque(maxlen=MAX_NEWS)
        self._num_keys = 0
        self._requests: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._forwarded: set[ForwardedRequest] = set()

    def note(self, body: dict[str, Any], keys: PromptKeys | None = None) -> None:
        """Record a request that is sent to the model of this server."""
        if not isinstance(req_id := body.get("req_id"), str):
            return  # a probe, or another request without an answer
        new = self.known.add((keys or prompt_keys(body)).chain)
        self._news += new
        self._num_keys += len(new)
        self._requests[owner_of(body).name, req_id] = None
        self._requests.move_to_end((owner_of(body).name, req_id))
        if len(self._requests) > MAX_REQUESTS:
            self._requests.popitem(last=False)

    @contextlib.contextmanager
    def forwarded(self, body: dict[str, Any], front_end: str) -> Iterator[ForwardedRequest]:
        """Record a request of another front end, which is open until the context ends."""
        keys = prompt_keys(body)
        request = ForwardedRequest(front_end, num_uncached_tokens(keys, self.known), shared_of({**body}))
        self.note(body, keys)
        if isinstance(body.get("req_id"), str):
            self._forwarded.add(request)
        try:
            yield request
        finally:
            self._forwarded.discard(request)

    def waiting(self, stream: str) -> dict[int, ForwardedRequest]:
        """Return the requests on a shared stream that have no first answer, by their tags."""
        found = [(each.shared, each) for each in self._forwarded if each.num_tokens]
        return {shared[1]: each for shared, each in found if shared and shared[0] == stream}

    def load(self, besides: str = "") -> Load:
        """Return the load of forwarded requests without those of the front end `besides`."""
        found = [each.num_tokens for each in self._forwarded if each.front_end != besides]
        return Load(len(found), sum(found))

    def has(self, owner: str, req_id: str) -> bool:
        """Return whether the model of this server has been sent this request."""
        return (owner, req_id) in self._requests

    def summary(self, poll: Poll, state: ModelState | None, reason: str, load: Load = NO_LOAD) -> Summary:
        """Return the answer to a poll."""
        num_new = self._num_keys - poll.since
        is_all = poll.identity != self.identity or not 0 <= num_new <= len(self._news)
        keys = list(self.known) if is_all else list(self._news)[len(self._news) - num_new :]
        has_request = poll.find is not None and self.has(*poll.find)
        return Summary(self.identity, state, reason, self._num_keys, keys, is_all, has_request, load)


read_poll = msgspec.msgpack.Decoder(Poll).decode
read_summary = msgspec.msgpack.Decoder(Summary).decode
write = msgspec.msgpack.Encoder().encode
