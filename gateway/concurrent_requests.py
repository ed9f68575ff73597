"""The answers to several requests of one exchange, run side by side. Those that the model has no room for wait here."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from engine.errors import Overloaded
from engine.settings.config import Config
from engine.wire import Delta

MAX_AT_ONCE = 128  # of one exchange
# After a refusal, when the exchange has nothing open whose end would make room. Soon, whatever the refusal says: when
# the gateway stops, its client has to be told.
ASK_AGAIN_S = 0.25

Ask = Callable[[], AsyncGenerator[Delta, None]]


def max_concurrent_requests(config: Config) -> int:
    """Half of the queue is left to others."""
    return min(MAX_AT_ONCE, config.batch_size + config.max_cached_task_num // 2)


async def run_concurrently(
    asks: Sequence[Ask], at_once: int, timeout_s: float
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Each answer with the index of its request, as they come. The first error is raised and ends the others.

    As long as the model has taken none of them, its refusal is that of the exchange. Later, when work was spent, who is
    refused waits and is asked for again, for `timeout_s` without any answer.
    """
    if len(asks) == 1:
        async with contextlib.aclosing(asks[0]()) as stream:
            async for answer in stream:
                yield 0, answer
        return
    clock, deadline = asyncio.get_running_loop().time, 0.0
    line, answered = _CongestionWindow(len(asks), at_once), set[int]()
    answers_of_all: _Answers = asyncio.Queue(maxsize=len(asks))
    tasks: set[asyncio.Task[None]] = set()
    try:
        while not line.is_over:
            tasks |= {asyncio.create_task(_forward(index, asks[index](), answers_of_all)) for index in line.take()}
            index, item = await answers_of_all.get()
            if item is None:
                line.has_ended()
            elif isinstance(item, Delta):
                deadline = clock() + timeout_s
                answered.add(index)
                yield index, item
            elif not isinstance(item, Overloaded) or index in answered:
                raise item
            elif not line.was_refused(index):
                if clock() >= deadline:
                    raise item
                await asyncio.sleep(ASK_AGAIN_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_Answers = asyncio.Queue[tuple[int, Delta | Exception | None]]  # None: no more of this one


async def _forward(index: int, stream: AsyncGenerator[Delta, None], answers_of_all: _Answers) -> None:
    end = None
    try:
        async with contextlib.aclosing(stream):
            async for answer in stream:
                await answers_of_all.put((index, answer))
    except Exception as error:
        end = error
    await answers_of_all.put((index, end))


class _CongestionWindow:
    """Which requests wait, and how many may be open: found as TCP finds what a line takes, half of those that are open
    when one is refused, one more with each round that ends. So several exchanges share a full server, and leave room
    for who has one request."""

    def __init__(self, num_requests: int, at_once: int):
        self._waiting = deque(range(num_requests))
        self._num_open = 0
        self._max_open, self._at_once = float(at_once), at_once

    @property
    def is_over(self) -> bool:
        return not self._waiting and not self._num_open

    def take(self) -> Iterator[int]:
        """Those to ask for now."""
        while self._waiting and self._num_open < self._max_open:
            self._num_open += 1
            yield self._waiting.popleft()

    def has_ended(self) -> None:
        self._num_open -= 1
        self._max_open = min(self._at_once, self._max_open + 1 / self._max_open)

    def was_refused(self, index: int) -> bool:
        """Whether others are open, whose ends make room."""
        self._num_open -= 1
        self._max_open = max(1.0, self._num_open / 2)
        self._waiting.append(index)
        return self._num_open > 0
