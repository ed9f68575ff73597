"""Cache of finished requests, limited by time and tokens: a client that has lost its connection can resume its answer,
and stored responses can be retrieved. It holds no KV cache blocks; those may still be in the prefix cache."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import cached_property

from engine.errors import DuplicateRequest, RequestError
from engine.serving.choice import RequestState
from engine.wire import GenerationRequest, shown

RETENTION_S = 60.0
MAX_TOKENS = 1 << 19  # of all cached prompts and answers: about 100 bytes each, some kilobytes with logprobs
BYTES_PER_TOKEN = 4  # by which the text beside the tokens is counted


@dataclass(frozen=True, eq=False)
class FinishedRequest:
    """A request that has ended, and the error that ended it, if any."""

    state: RequestState
    error: RequestError | None = None
    since: float = field(default_factory=time.monotonic)

    @cached_property
    def size(self) -> int:
        """Return the memory of the request in units of one token without logprobs."""
        state = self.state
        has_logprobs = state.prompt.sampling.num_logprobs >= 0
        num_bytes = sum(len(image.url) for image in state.request.images)
        num_bytes += len(json.dumps(state.storing.about)) if state.storing else 0
        num_answered = state.num_tokens * (1 + 20 * has_logprobs) + 21 * state.num_scores
        return len(state.prompt.token_ids) + num_answered + num_bytes // BYTES_PER_TOKEN


class FinishedRequestCache:
    """Finished requests by owner and req_id. Above `max_tokens` the oldest request of the owner with the most tokens is
    evicted, so that one owner cannot displace the requests of the others. Thread-safe."""

    def __init__(self, retention_s: float, max_tokens: int) -> None:
        self._retention_s, self._max_tokens = retention_s, max_tokens
        self._finished: dict[str, OrderedDict[str, FinishedRequest]] = {}  # by owner, the oldest first
        self._sizes: Counter[str] = Counter()  # by owner
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._finished.values()))

    def add(self, finished: FinishedRequest) -> None:
        """Cache the request and evict others until the limit is met."""
        owner, req_id = finished.state.owner, finished.state.request.req_id
        with self._lock:
            self._evict_expired(owner)
            self._pop(owner, req_id)
            self._finished.setdefault(owner, OrderedDict())[req_id] = finished
            self._grow(owner, finished.size)
            while self._size > self._max_tokens:
                largest = max(self._sizes, key=self._sizes.__getitem__)
                self._pop(largest, next(iter(self._finished[largest])))

    def get(self, owner: str, req_id: str) -> FinishedRequest | None:
        """Return the request, or None if it is unknown or expired."""
        with self._lock:
            self._evict_expired(owner)
            return self._finished.get(owner, OrderedDict()).get(req_id)

    def pop(self, owner: str, req_id: str) -> FinishedRequest | None:
        """Remove the request and return it, or None if it is unknown or expired."""
        with self._lock:
            self._evict_expired(owner)
            return self._pop(owner, req_id)

    def evict_expired(self) -> None:
        """Remove all requests that ended more than `retention_s` seconds ago."""
        with self._lock:
            for owner in list(self._finished):
                self._evict_expired(owner)

    def _evict_expired(self, owner: str) -> None:
        end = time.monotonic() - self._retention_s
        while finished := self._finished.get(owner):
            req_id = next(iter(finished))
            if finished[req_id].since > end:
                return
            self._pop(owner, req_id)

    def _pop(self, owner: str, req_id: str) -> FinishedRequest | None:
        finished = self._finished.get(owner, OrderedDict()).pop(req_id, None)
        if finished:
            self._grow(owner, -finished.size)
            if not self._finished[owner]:
                del self._finished[owner], self._sizes[owner]
        return finished

    def _grow(self, owner: str, size: int) -> None:
        self._sizes[owner] += size
        self._size += size


def check_same(state: RequestState, again: GenerationRequest) -> None:
    """Raise DuplicateRequest unless `again` repeats the request: only a client that knows it may have its answer."""
    if not state.is_same(again):
        text = "The {field} {value} is another request's: to go on with its answer, send the same request again"
        raise DuplicateRequest(text, field="req_id", value=shown(again.req_id))
