"""Shared stream of model responses (engine/wire/shared_answers.py).

A request's answers arrive on the shared stream and on its own stream; they are merged in token order. It is independent
of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Iterator
from typing import Any

from tritonclient.grpc import service_pb2

from engine import wire
from engine.errors import RequestError
from engine.wire.triton import infer_request, payload_of
from gateway.backend import ModelLost
from gateway.triton_connections import TritonConnections

Answer = wire.Delta | wire.Failure


class ReorderBuffer:
    """Answers to one request, which arrive on two streams and are delivered in token order."""

    def __init__(self) -> None:
        self.has_shared_stream = True  # if False, answers that are missing can no longer arrive
        self._in_order: asyncio.Queue[Answer | Exception] = asyncio.Queue()
        self._early: dict[int, Answer] = {}  # answers that arrived too early, by the number of tokens before them
        self._num_tokens = 0

    def put(self, answer: Answer) -> None:
        """Add an answer from either stream."""
        self._early[answer.send_idx] = answer
        while following := self._early.pop(self._num_tokens, None):
            self._in_order.put_nowait(following)
            if not isinstance(following, wire.Delta) or not following.token_ids:
                break
            self._num_tokens += len(following.token_ids)
        self._fail_if_incomplete()

    def end_shared_stream(self) -> None:
        """Note that the shared stream has ended. Fail if an answer is missing that can no longer arrive."""
        self.has_shared_stream = False
        self._fail_if_incomplete()

    def fail(self, error: Exception) -> None:
        """Raise `error` from `next`, after the answers that are complete so far."""
        self._in_order.put_nowait(error)

    async def next(self) -> Answer:
        """Return the next answer in token order. Raise the error with which the streams failed."""
        answer = await self._in_order.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _fail_if_incomplete(self) -> None:
        if self._early and not self.has_shared_stream:
            self.fail(ModelLost("a part of the answer is lost"))


class SharedStream:
    """One stream that carries answers to the requests that start while it is open.

    A request joins before it is sent.
    """

    def __init__(self, connections: TritonConnections):
        self._name = uuid.uuid4().hex
        self._tags = itertools.count()
        self._sharing: dict[int, ReorderBuffer] = {}
        self._reading = asyncio.create_task(self._read(connections))

    @property
    def is_open(self) -> bool:
        """Return True if further requests may join."""
        return not self._reading.done()

    @contextlib.contextmanager
    def join(self, body: dict[str, Any]) -> Iterator[tuple[dict[str, Any], ReorderBuffer]]:
        """Yield the request with its tag in the shared stream, and the buffer in which its answers arrive."""
        tag = next(self._tags)
        buffer = self._sharing[tag] = ReorderBuffer()
        try:
            yield {**body, wire.SHARED: [self._name, tag]}, buffer
        finally:
            del self._sharing[tag]

    async def _read(self, connections: TritonConnections) -> None:
        """Read the stream until the model ends it, because it is idle for some time or the server is stopping."""
        request = infer_request({wire.SHARE: self._name}).SerializeToString()
        try:
            with (
                contextlib.suppress(RequestError),
                connections.infer(request) as inference,
            ):
                async for response in inference.responses():
                    self._deliver(payload_of(service_pb2.ModelStreamInferResponse.FromString(response)))
        finally:
            for buffer in self._sharing.values():
                buffer.end_shared_stream()

    def _deliver(self, response: bytes) -> None:
        shared = wire.read_shared(response)
        if isinstance(shared, wire.Failure):
            raise shared.error
        for tag, answer in shared.answers:
            if buffer := self._sharing.get(tag):  # otherwise the client has disconnected
                buffer.put(answer)
