"""Concurrent requests of one exchange, for example several prompts of a completion.

Requests beyond the model's capacity wait here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from engine.errors import Overloaded
from engine.settings.config import Config
from engine.wire import Delta

MAX_AT_ONCE = 128  # concurrent requests of one exchange
# Pause before a refused request is sent again if the exchange has no open request whose end makes room. It is short,
# whatever the refusal's Retry-After says, so that the client learns soon when the gateway stops.
RETRY_AFTER_S = 0.25

Ask = Callable[[], AsyncGenerator[Delta, None]]


def max_concurrent_requests(config: Config) -> int:
    """Return how many requests of one exchange may run at the same time. Half of the queue is left to other clients."""
    return min(MAX_AT_ONCE, config.max_running + config.max_cached_task_num // 2)


async def run_concurrently(
    generators: Sequence[Ask], at_once: int, timeout_s: float
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield (index of the request, answer) as answers arrive.

    The first error is raised and cancels the others.

    If the model refuses a request as Overloaded before it has answered any of them, the refusal is raised. Later, when
    work has been spent, a refused request waits and is sent again, for `timeout_s` seconds without any answer.
    """
    if len(generators) == 1:
        async with contextlib.aclosing(generators[0]()) as stream:
            async for answer in stream:
                yield 0, answer
        return
    clock, deadline = asyncio.get_running_loop().time, 0.0
    window, answered = _CongestionWindow(len(generators), at_once), set[int]()
    answers_of_all: _AnswerQueue = asyncio.Queue(maxsize=len(generators))
    tasks: set[asyncio.Task[None]] = set()
    try:
        while not window.is_over:
            tasks |= {
                asyncio.create_task(_forward(index, generators[index](), answers_of_all)) for index in window.take()
            }
            index, item = await answers_of_all.get()
            if item is None:
                window.release()
            elif isinstance(item, Delta):
                deadline = clock() + timeout_s
                answered.add(index)
                yield index, item
            elif not isinstance(item, Overloaded) or index in answered:
                raise item
            elif not window.requeue(index):
                if clock() >= deadline:
                    raise item
                await asyncio.sleep(RETRY_AFTER_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_AnswerQueue = asyncio.Queue[tuple[int, Delta | Exception | None]]  # None: this request has ended


async def _forward(index: int, stream: AsyncGenerator[Delta, None], answers_of_all: _AnswerQueue) -> None:
    end = None
    try:
        async with contextlib.aclosing(stream):
            async for answer in stream:
                await answers_of_all.put((index, answer))
    except Exception as error:
        end = error
    await answers_of_all.put((index, end))


class _CongestionWindow:
    """Requests that wait, and the number that may be open at once.

    The limit adapts like TCP's congestion window: it is halved when a request is refused and grows by one per round of
    finished requests. So several exchanges share a full server, and clients with a single request still get in.
    """

    def __init__(self, num_requests: int, at_once: int):
        self._waiting = deque(range(num_requests))
        self._num_open = 0
        self._max_open, self._at_once = float(at_once), at_once

    @property
    def is_over(self) -> bool:
        return not self._waiting and not self._num_open

    def take(self) -> Iterator[int]:
        """Yield the indices of the requests to send now."""
        while self._waiting and self._num_open < self._max_open:
            self._num_open += 1
            yield self._waiting.popleft()

    def release(self) -> None:
        self._num_open -= 1
        self._max_open = min(self._at_once, self._max_open + 1 / self._max_open)

    def requeue(self, index: int) -> bool:
        """Queue the request again. Return True if other requests are open, whose end makes room."""
        self._num_open -= 1
        self._max_open = max(1.0, self._num_open / 2)
        self._waiting.append(index)
        return self._num_open > 0
