"""Who waits, and in which order they begin. Pure bookkeeping: no clock, no blocks, no slots."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from math import inf

from engine.core.types import Request

LEVEL_TOKENS = 1 << 16  # a priority of 1 is as if so many tokens more had been asked for before


class WaitingQueue:
    """Each request gets a turn when it comes, in tokens that are asked for before it, and the least turn is next.

    Every owner has a row of their own, in which the requests stand one behind the other. All rows move on together, as
    what is at their heads begins: so owners get equal shares of the tokens, and who asks seldom is next. With one
    owner it is first come, first served.

    A turn never changes, but later ones come further and further behind. So a request of low priority is overtaken by
    `LEVEL_TOKENS` a level at most and nobody starves. Who had begun already comes back to the front.
    """

    def __init__(self) -> None:
        self.num_tokens = 0  # of their prompts
        self._order: list[tuple[float, int, Request]] = []  # by turn, then by arrival
        self._place_of: dict[str, tuple[float, int, Request]] = {}
        self._num_arrived = 0
        self._now = 0.0  # the turn of the last one that has begun, as if it had no priority
        self._end_of: dict[str, float] = {}  # of each owner's row

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        return (request for *_, request in self._order)

    def first(self, count: int, max_tokens: int | None = None) -> list[Request]:
        """Return the first `count`, with `max_tokens` of those that have no more tokens."""
        if max_tokens is None:
            return [request for *_, request in self._order[:count]]
        return list(islice((request for request in self if len(request.token_ids) <= max_tokens), count))

    def get(self, request_id: str) -> Request | None:
        return self._place_of[request_id][2] if request_id in self._place_of else None

    def add(self, request: Request) -> None:
        turn = max(self._now, self._end_of.get(request.owner, 0.0))
        self._end_of[request.owner] = turn + _cost(request)
        self._num_arrived += 1
        self._insert(turn + request.priority * LEVEL_TOKENS, self._num_arrived, request)

    def put_back(self, request: Request) -> None:
        """Before all others: it had begun."""
        self._num_arrived += 1
        self._insert(-inf, -self._num_arrived, request)

    def begin(self, request: Request) -> None:
        """It waits no longer."""
        turn = self._remove(request.request_id)
        self._now = max(self._now, turn - request.priority * LEVEL_TOKENS)
        if not self._order:
            self._end_of.clear()

    def drop(self, request_id: str) -> bool:
        """It is not wanted any more, so its owner has not asked for it. False if it is not here."""
        if (request := self.get(request_id)) is None:
            return False
        if self._remove(request_id) > -inf and request.owner in self._end_of:
            self._end_of[request.owner] -= _cost(request)
        return True

    def _insert(self, turn: float, number: int, request: Request) -> None:
        place = (turn, number, request)
        self._place_of[request.request_id] = place
        insort(self._order, place)
        self.num_tokens += request.prompt_len

    def _remove(self, request_id: str) -> float:
        place = self._place_of.pop(request_id)
        del self._order[bisect_left(self._order, place)]
        self.num_tokens -= place[2].prompt_len
        return place[0]


def _cost(request: Request) -> int:
    """The tokens that are asked for."""
    answers = (request, *request.forks)
    return request.prompt_len + sum(each.sampling.max_new_tokens for each in answers)
