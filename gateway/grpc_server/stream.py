"""One client's stream of inference requests: each is a call of its own to tritonserver, all share the way back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from engine import wire
from engine.errors import InvalidRequest, RequestError
from engine.settings.served import ServedModel
from engine.wire.triton import DATATYPE, MODEL, OUTPUT, VERSION, as_string
from gateway.body_memory import BodyMemoryBudget, BodyMemoryReservation
from gateway.grpc_server.message_limits import IncomingMessages
from gateway.grpc_server.request import MAX_ID_LEN, InvalidInferRequest, parse, payload_of, rewritten
from gateway.grpc_server.retry import retrying_responses
from gateway.health import CachedHealthCheck
from gateway.idle_timer import IdleTimer
from gateway.triton_connections import TritonConnections

log = logging.getLogger(__name__)

MAX_OPEN = 256  # requests of one stream; further ones are read when some have ended
READ_WITHIN_S = 300.0  # a client that takes nothing for so long is taken for gone
STOPPING = "the server is stopping"


@dataclass(eq=False)
class StreamContext:
    """What every stream needs."""

    connections: TritonConnections
    ready: CachedHealthCheck  # whether the model can be asked
    served: ServedModel  # which it is
    intake: BodyMemoryBudget
    max_body_bytes: int


@dataclass(eq=False)
class InferStream:
    way: StreamContext
    context: Any  # gRPC's
    incoming: IncomingMessages
    owner: wire.Owner  # of the key that it carries
    num_requests: int = 0
    num_responses: int = 0
    _answers: set[asyncio.Task[None]] = field(default_factory=set)  # the running ones
    _is_stopping: bool = False
    _cut_by: RequestError | None = None  # what is open ends with it

    def __post_init__(self) -> None:
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._unread = IdleTimer(self._give_up, READ_WITHIN_S)

    async def serve(self) -> None:
        """Returns when the client has said all it wants to and has all its answers. When it leaves, this is cancelled,
        and with it every request."""
        self._unread.ends()
        try:
            while (message := await self.incoming.next()) is not grpc.aio.EOF:
                await self._begin(message)
                while len(self._answers) >= MAX_OPEN:
                    await asyncio.wait(self._answers, return_when=asyncio.FIRST_COMPLETED)
            if error := self.incoming.refusal:
                await self._refuse(error)
            while self._answers:
                await asyncio.wait(self._answers)
            if self._unread.was_too_long:
                text = f"the client took nothing for {READ_WITHIN_S:g} s, its requests are cancelled"
                await self.context.abort(grpc.StatusCode.ABORTED, text)
            if self._is_stopping:
                await self.context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING)
        finally:
            self._unread.close()
            for answer in self._answers:
                answer.cancel()

    def stop(self) -> None:
        """Takes no more requests; ends when those that it has are answered."""
        self._is_stopping = True
        self.incoming.stop()

    def cut(self, error: RequestError) -> None:
        """Ends every request with it, now."""
        self._cut_by = error
        for answer in self._answers:
            answer.cancel()

    async def _refuse(self, error: RequestError) -> None:
        """The message that was coming; what is open ends with it."""
        if not self._answers:
            await self._write(_failure("", error))
            return
        self.cut(error)
        await asyncio.wait(self._answers)
        await self.context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    def _give_up(self) -> None:
        self.stop()
        for answer in self._answers:
            answer.cancel()

    async def _begin(self, message: bytes) -> None:
        self.num_requests += 1
        name, room = "", BodyMemoryReservation(self.way.intake)
        try:
            room.reserve(len(message))
            async with self.way.intake.reading(len(message)):
                request = parse(message)
                name = request.id
                fresh = self._checked(request)
        except (InvalidInferRequest, RequestError) as error:
            room.release()
            await self._write(_refusal(name, error))
            return
        except BaseException:
            room.release()
            raise
        answer = asyncio.create_task(self._answer(name, fresh, room))
        self._answers.add(answer)
        self.incoming.is_in_use = True
        answer.add_done_callback(self._has_ended)
        answer.add_done_callback(lambda _: room.release())  # also of one that was cancelled before it began

    def _checked(self, request: service_pb2.ModelInferRequest) -> bytes:
        """What tritonserver gets in its place."""
        payload, limit = payload_of(request), self.way.max_body_bytes
        if len(payload) > limit:
            text = "The request has {value} bytes, at most MAX_BODY_BYTES({limit}) are taken"
            raise InvalidRequest(text, value=len(payload), limit=limit)
        return rewritten(request, wire.payload_with_owner(payload, self.owner))

    async def _answer(self, name: str, request: bytes, room: BodyMemoryReservation) -> None:
        try:
            way = self.way
            async for response in retrying_responses(way.connections, way.ready, way.served, request):
                room.release()
                await self._write(response)
        except asyncio.CancelledError:
            if not self._cut_by:
                raise
            await self._end(name, self._cut_by)
        except Exception as error:
            if not self.context.done():
                if not isinstance(error, RequestError):
                    log.exception("a request failed unexpectedly")
                await self._end(name, error if isinstance(error, RequestError) else RequestError("internal error"))

    def _has_ended(self, answer: asyncio.Task[None]) -> None:
        self._answers.discard(answer)
        self.incoming.is_in_use = bool(self._answers)

    async def _end(self, name: str, error: RequestError) -> None:
        if not self.context.done():
            await self._write(_failure(name, error))

    async def _write(self, message: bytes) -> None:
        """Returns when the client has room for it, so that no more is read than it takes."""
        async with self._writing:
            self._unread.begins()
            with contextlib.suppress(grpc.aio.InternalError):  # the client has left: in a moment all this is cancelled
                await self.context.write(message)
                self.num_responses += 1
                self.incoming.has_answered()
            self._unread.ends()


def _refusal(name: str, error: InvalidInferRequest | RequestError) -> bytes:
    """What is none of our requests is told so in Triton's way, the others as the model would."""
    if isinstance(error, RequestError):
        return _failure(name, error)
    response = service_pb2.ModelStreamInferResponse(error_message=str(error))
    response.infer_response.id = name[:MAX_ID_LEN]
    return response.SerializeToString()


def _failure(name: str, error: RequestError) -> bytes:
    response = service_pb2.ModelStreamInferResponse()
    inference = response.infer_response
    inference.model_name, inference.model_version, inference.id = MODEL, VERSION, name
    inference.parameters["triton_final_response"].bool_param = True
    inference.outputs.add(name=OUTPUT, datatype=DATATYPE, shape=[1])
    inference.raw_output_contents.append(as_string(wire.native_json(wire.Failure(error))))
    return response.SerializeToString()
