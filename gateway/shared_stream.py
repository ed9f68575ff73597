"""A stream of the model's that requests of this process share (engine/wire/shared.py), and what comes of each of them
there and on its own stream, in the order of its tokens: of two streams neither waits for the other. Knows no HTTP."""

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
    """The answers to one request."""

    def __init__(self) -> None:
        self.from_two = True  # streams; when it is one, what is missing does not come any more
        self._in_order: asyncio.Queue[Answer | Exception] = asyncio.Queue()
        self._early: dict[int, Answer] = {}  # by the number of tokens before them
        self._num_tokens = 0

    def put(self, answer: Answer) -> None:
        self._early[answer.send_idx] = answer
        while following := self._early.pop(self._num_tokens, None):
            self._in_order.put_nowait(following)
            if not isinstance(following, wire.Delta) or not following.token_ids:
                break
            self._num_tokens += len(following.token_ids)
        self._miss()

    def only_own(self) -> None:
        self.from_two = False
        self._miss()

    def fail(self, error: Exception) -> None:
        """After what has come in order."""
        self._in_order.put_nowait(error)

    async def next(self) -> Answer:
        """Raises what its streams have failed with."""
        answer = await self._in_order.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _miss(self) -> None:
        if self._early and not self.from_two:
            self.fail(ModelLost("a part of the answer is lost"))


class SharedStream:
    """Of the requests that begin while it is open; each joins before it is asked."""

    def __init__(self, connections: TritonConnections):
        self._name = uuid.uuid4().hex
        self._tags = itertools.count()
        self._sharing: dict[int, ReorderBuffer] = {}
        self._reading = asyncio.create_task(self._read(connections))

    @property
    def is_open(self) -> bool:
        return not self._reading.done()

    @contextlib.contextmanager
    def join(self, body: dict[str, Any]) -> Iterator[tuple[dict[str, Any], ReorderBuffer]]:
        """The request that says so, and where its answers come."""
        tag = next(self._tags)
        arrivals = self._sharing[tag] = ReorderBuffer()
        try:
            yield {**body, wire.SHARED: [self._name, tag]}, arrivals
        finally:
            del self._sharing[tag]

    async def _read(self, connections: TritonConnections) -> None:
        """Until the model ends it: nobody has shared it for some time, or it is stopping."""
        request = infer_request({wire.SHARE: self._name}).SerializeToString()
        try:
            with contextlib.suppress(RequestError), connections.infer(request) as inference:  # own streams tell as well
                async for response in inference.responses():
                    self._deliver(payload_of(service_pb2.ModelStreamInferResponse.FromString(response)))
        finally:
            for arrivals in self._sharing.values():
                arrivals.only_own()

    def _deliver(self, response: bytes) -> None:
        shared = wire.read_shared(response)
        if isinstance(shared, wire.Failure):
            raise shared.error
        for tag, answer in shared.answers:
            if arrivals := self._sharing.get(tag):  # else its client has left
                arrivals.put(answer)
