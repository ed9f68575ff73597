"""OpenAI's completions and chat completions over the native request. Runs the choices; the shapes are elsewhere.

Several choices are several requests of the model, run side by side and interleaved in a stream. The first failure
ends all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from engine.errors import RequestError
from gateway import answers
from gateway.backend import Answer, Backend
from gateway.openai_answer import Writer
from gateway.openai_request import Completion, parse

DONE = b"data: [DONE]\n\n"


async def complete(request: web.Request, body: dict[str, Any], backend: Backend, is_chat: bool) -> web.StreamResponse:
    settings = request.app[answers.SETTINGS]
    call = request[answers.CALL]
    completion = parse(body, is_chat, settings.model_name)
    timeout_s = completion.timeout_s or settings.request_timeout_s
    writer = Writer(completion)
    choices = [_choice(backend.generate(each, timeout_s), completion) for each in completion.requests]
    responses = _side_by_side(choices)
    if completion.stream:
        return await answers.stream(request, _events(call, responses, writer), "text/event-stream", _event)
    async with contextlib.aclosing(responses):
        async for index, response in responses:
            writer.gather(index, response)
    whole = writer.whole()
    call.num_tokens = whole["usage"]["completion_tokens"]
    return answers.answer(whole)


async def _choice(stream: AsyncGenerator[Answer, None], completion: Completion) -> AsyncGenerator[Answer, None]:
    async with contextlib.aclosing(stream):
        try:
            async for answer in stream:
                yield answer
        except RequestError as error:
            raise completion.in_clients_words(error) from None


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + answers.dump(fields) + b"\n\n"


async def _events(
    call: answers.Call, responses: AsyncGenerator[tuple[int, Answer], None], writer: Writer
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(responses):
        async for index, response in responses:
            events = [_event(chunk) for chunk in writer.chunks(index, response)]
            if writer.is_complete:
                call.num_tokens = writer.usage()["completion_tokens"]
                if writer.completion.include_usage:
                    events.append(_event(writer.usage_chunk()))
                events.append(DONE)
            if events:
                yield b"".join(events)


async def _side_by_side(streams: list[AsyncGenerator[Answer, None]]) -> AsyncGenerator[tuple[int, Answer], None]:
    """Each answer with the index of its stream, as they come. The first error is raised and ends the others."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for answer in stream:
                yield 0, answer
        return
    answers_of_all: asyncio.Queue[tuple[int, Answer | Exception | None]] = asyncio.Queue(maxsize=len(streams))

    async def forward(index: int, stream: AsyncGenerator[Answer, None]) -> None:
        end = None
        try:
            async with contextlib.aclosing(stream):
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
