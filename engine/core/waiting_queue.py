"""Queue of waiting requests: decides their order by owner and priority. Independent of the clock, blocks and slots."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from math import inf

from engine.core.types import Request

LEVEL_TOKENS = 1 << 16  # one priority level counts like so many requested tokens


class WaitingQueue:
    """Waiting requests in the order of their start, by start-time fair queueing. The cost of a request is the number of
    tokens of its prompt and its answers.

    When a request arrives it gets a start tag: the larger of the current virtual time and the finish tag of the last
    request of the same owner. The request with the smallest tag is next, and starting it advances the virtual time. So
    owners with waiting requests get equal shares of the tokens, and with one owner it is first come, first served.

    Priorities shift the tag by `LEVEL_TOKENS` a level. Tags never change while the virtual time advances, so requests
    of low priority do not starve. Preempted requests come first.
    """

    def __init__(self) -> None:
        self.num_tokens = 0  # of their prompts
        self._order: list[tuple[float, int, Request]] = []  # sorted: start tag, number of the arrival
        self._entry_of: dict[str, tuple[float, int, Request]] = {}
        self._num_arrived = 0
        self._virtual_time = 0.0  # start tag of the last started request, without its priority
        self._finish_tag_of: dict[str, float] = {}  # finish tag of each owner's last request

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        return (request for *_, request in self._order)

    def first(self, count: int, max_tokens: int | None = None) -> list[Request]:
        """Return the first `count` requests of `ready`."""
        return list(islice(self.ready(max_tokens), count))

    def ready(self, max_tokens: int | None = None) -> Iterator[Request]:
        """Yield the requests that await no blocks and no images, of those with at most `max_tokens` tokens if that is
        given."""
        limit = inf if max_tokens is None else max_tokens
        for *_, request in self._order:
            if not request.awaits_blocks and request.images_from < 0 and len(request.token_ids) <= limit:
                yield request

    def get(self, request_id: str) -> Request | None:
        """Return the request, or None if it does not wait."""
        return self._entry_of[request_id][2] if request_id in self._entry_of else None

    def add(self, request: Request) -> None:
        """Add a request behind those of its owner."""
        tag = max(self._virtual_time, self._finish_tag_of.get(request.owner, 0.0))
        self._finish_tag_of[request.owner] = tag + _cost(request)
        self._num_arrived += 1
        self._insert(tag + request.priority * LEVEL_TOKENS, self._num_arrived, request)

    def put_back(self, request: Request) -> None:
        """Put a preempted request before all others."""
        self._num_arrived += 1
        self._insert(-inf, -self._num_arrived, request)

    def begin(self, request: Request) -> None:
        """Remove a request that starts to run."""
        tag = self._remove(request.request_id)
        self._virtual_time = max(self._virtual_time, tag - request.priority * LEVEL_TOKENS)
        if not self._order:
            self._finish_tag_of.clear()

    def drop(self, request_id: str) -> bool:
        """Remove a request without charging its owner. Return False if it does not wait."""
        if (request := self.get(request_id)) is None:
            return False
        if self._remove(request_id) > -inf and request.owner in self._finish_tag_of:
            self._finish_tag_of[request.owner] -= _cost(request)
        return True

    def _insert(self, tag: float, arrival: int, request: Request) -> None:
        entry = (tag, arrival, request)
        self._entry_of[request.request_id] = entry
        insort(self._order, entry)
        self.num_tokens += request.prompt_len

    def _remove(self, request_id: str) -> float:
        entry = self._entry_of.pop(request_id)
        del self._order[bisect_left(self._order, entry)]
        self.num_tokens -= entry[2].prompt_len
        return entry[0]


def _cost(request: Request) -> int:
    """Return the number of tokens of the prompt and, at most, of all answers."""
    answers = (request, *request.forks)
    return request.prompt_len + sum(each.sampling.max_new_tokens for each in answers)
