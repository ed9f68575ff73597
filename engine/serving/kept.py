"""Answers whose client has left, or has been sent the end, kept for a while: it may have lost its connection and ask
again. Nothing of them is computed meanwhile; their blocks are in the prefix cache until somebody needs the room."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from engine.errors import DuplicateRequest
from engine.serving.choice import Asked
from engine.wire import GenerationRequest, shown

KEPT_S = 60.0
MAX_TOKENS = 1 << 19  # of all prompts and answers that are kept: some 100 bytes each, with logprobs some kilobytes


class KeptAnswers:
    """By req_id, the oldest first. Thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[float, int, Asked]] = OrderedDict()  # since when, its size
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, asked: Asked) -> None:
        has_logprobs = asked.prompt.sampling.num_logprobs >= 0
        size = len(asked.prompt.token_ids) + asked.num_tokens * (1 + 20 * has_logprobs) + 21 * asked.num_scores
        with self._lock:
            self._remove(asked.request.req_id)
            self._kept[asked.request.req_id] = (time.monotonic(), size, asked)
            self._size += size
            while self._kept:
                req_id, (since, _, _) = next(iter(self._kept.items()))
                if self._size <= MAX_TOKENS and time.monotonic() - since <= KEPT_S:
                    break
                self._remove(req_id)

    def take(self, request: GenerationRequest) -> Asked | None:
        """For the one who has asked before. Raises DuplicateRequest when it was another who did, under its name."""
        with self._lock:
            since, _, asked = self._kept.get(request.req_id, (0.0, 0, None))
            if asked is None or time.monotonic() - since > KEPT_S:
                return None
            check_same(asked, request)
            self._remove(request.req_id)
            return asked

    def _remove(self, req_id: str) -> None:
        if req_id in self._kept:
            self._size -= self._kept.pop(req_id)[1]


def check_same(asked: Asked, again: GenerationRequest) -> None:
    """Only who knows the whole request may have its answer."""
    if not asked.is_same(again):
        text = "The {field} {value} is another request's: to go on with its answer, send the same request again"
        raise DuplicateRequest(text, field="req_id", value=shown(again.req_id))
