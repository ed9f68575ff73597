"""The answers to several requests of one exchange, run side by side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from engine.wire import Delta

MAX_AT_ONCE = 128  # of one exchange: the others of many inputs wait here, where they take no place of anybody else's


async def side_by_side(streams: list[AsyncGenerator[Delta, None]]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Each answer with the index of its stream, as they come. The first error is raised and ends the others."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for answer in stream:
                yield 0, answer
        return
    answers_of_all: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(maxsize=len(streams))

    places = asyncio.Semaphore(MAX_AT_ONCE)

    async def forward(index: int, stream: AsyncGenerator[Delta, None]) -> None:
        end = None
        try:
            async with places, contextlib.aclosing(stream):
                async for answer in stream:
                    await answers_of_all.put((index, answer))
        except Exception as error:
            end = error
        await answers_of_all.put((index, end))

    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            index, item = await answers_of_all.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
