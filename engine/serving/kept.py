"""Answers that are kept after their end, within limits of time and of tokens: for a client that has lost its connection
and asks again, and for one that has asked for its response to be stored. Nothing of them is computed meanwhile; their
blocks are in the prefix cache until somebody needs the room."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import cached_property

from engine.errors import DuplicateRequest, RequestError
from engine.serving.choice import Asked
from engine.wire import GenerationRequest, shown

KEPT_S = 60.0
MAX_TOKENS = 1 << 19  # of all prompts and answers that are kept: some 100 bytes each, with logprobs some kilobytes
BYTES_PER_TOKEN = 4  # by which the text beside the tokens is counted


@dataclass(frozen=True, eq=False)
class Kept:
    """An answer that has ended, with the error that ended it."""

    asked: Asked
    error: RequestError | None = None
    since: float = field(default_factory=time.monotonic)

    @cached_property
    def size(self) -> int:
        """The memory it takes, counted in tokens without logprobs."""
        asked = self.asked
        has_logprobs = asked.prompt.sampling.num_logprobs >= 0
        num_beside = len(json.dumps(asked.storing.about)) // BYTES_PER_TOKEN if asked.storing else 0
        num_answered = asked.num_tokens * (1 + 20 * has_logprobs) + 21 * asked.num_scores
        return len(asked.prompt.token_ids) + num_answered + num_beside


class KeptAnswers:
    """Kept answers by owner and req_id. Beyond `max_tokens` the oldest of the owner that has most is dropped, so that
    one of them cannot push out what the others have. Thread-safe."""

    def __init__(self, kept_s: float, max_tokens: int) -> None:
        self._kept_s, self._max_tokens = kept_s, max_tokens
        self._kept: dict[str, OrderedDict[str, Kept]] = {}  # by owner, the oldest first
        self._sizes: Counter[str] = Counter()  # by owner
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def keep(self, kept: Kept) -> None:
        owner, req_id = kept.asked.owner, kept.asked.request.req_id
        with self._lock:
            self._drop_old(owner)
            self._pop(owner, req_id)
            self._kept.setdefault(owner, OrderedDict())[req_id] = kept
            self._grow(owner, kept.size)
            while self._size > self._max_tokens:
                largest = max(self._sizes, key=self._sizes.__getitem__)
                self._pop(largest, next(iter(self._kept[largest])))

    def get(self, owner: str, req_id: str) -> Kept | None:
        with self._lock:
            self._drop_old(owner)
            return self._kept.get(owner, OrderedDict()).get(req_id)

    def pop(self, owner: str, req_id: str) -> Kept | None:
        with self._lock:
            self._drop_old(owner)
            return self._pop(owner, req_id)

    def drop_old(self) -> None:
        with self._lock:
            for owner in list(self._kept):
                self._drop_old(owner)

    def _drop_old(self, owner: str) -> None:
        end = time.monotonic() - self._kept_s
        while kept := self._kept.get(owner):
            req_id = next(iter(kept))
            if kept[req_id].since > end:
                return
            self._pop(owner, req_id)

    def _pop(self, owner: str, req_id: str) -> Kept | None:
        kept = self._kept.get(owner, OrderedDict()).pop(req_id, None)
        if kept:
            self._grow(owner, -kept.size)
            if not self._kept[owner]:
                del self._kept[owner], self._sizes[owner]
        return kept

    def _grow(self, owner: str, size: int) -> None:
        self._sizes[owner] += size
        self._size += size


def check_same(asked: Asked, again: GenerationRequest) -> None:
    """Only who knows the whole request may have its answer."""
    if not asked.is_same(again):
        text = "The {field} {value} is another request's: to go on with its answer, send the same request again"
        raise DuplicateRequest(text, field="req_id", value=shown(again.req_id))
