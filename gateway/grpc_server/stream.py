"""One client's stream of inference requests.

Each request is a call of its own to tritonserver; all answers share the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from engine import wire
from engine.errors import InvalidRequest, RequestError
from engine.settings.served import ServedModel
from engine.wire.triton import DATATYPE, MODEL, OUTPUT, VERSION, encode_string
from gateway.backend import Backend
from gateway.body_memory import BodyMemoryBudget, BodyMemoryReservation
from gateway.grpc_server.message_limits import IncomingMessages
from gateway.grpc_server.request import MAX_ID_LEN, InvalidInferRequest, checked_payload, parse, rewritten
from gateway.grpc_server.retry import RETRY_TIMEOUT_S, retrying_responses
from gateway.health import CachedHealthCheck
from gateway.idle_timer import IdleTimer
from gateway.native.request import names_in
from gateway.triton_connections import TritonConnections

log = logging.getLogger(__name__)

MAX_OPEN = 256  # running requests of one stream; further ones are read when some have finished
CLIENT_TIMEOUT_S = 300.0  # a client that reads nothing for so long counts as disconnected
STOPPING = "the server is stopping"


@dataclass(eq=False)
class StreamContext:
    """Objects that all streams share."""

    connections: TritonConnections
    ready: CachedHealthCheck  # checks whether the model answers
    served: ServedModel  # says which model is served
    body_memory: BodyMemoryBudget
    max_body_bytes: int
    replicated: Backend | None = None  # all replicas of the model, if there are others


@dataclass(eq=False)
class InferStream:
    """One ModelStreamInfer call of a client, with its running requests."""

    shared: StreamContext
    context: grpc.aio.ServicerContext
    incoming: IncomingMessages
    owner: wire.Owner  # owner of the API key
    num_requests: int = 0
    num_responses: int = 0
    _answers: set[asyncio.Task[None]] = field(default_factory=set)  # running requests
    _is_stopping: bool = False
    _cut_by: RequestError | None = None  # error with which the running requests end

    def __post_init__(self) -> None:
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._write_timer = IdleTimer(self._give_up, CLIENT_TIMEOUT_S)

    async def serve(self) -> None:
        """Serve until the client has closed its side and all answers are sent.

        When the client disconnects, this task is cancelled and so are all requests.
        """
        self._write_timer.end_wait()
        try:
            while (message := await self.incoming.next()) is not grpc.aio.EOF:
                await self._begin(message)
                while len(self._answers) >= MAX_OPEN:
                    await asyncio.wait(self._answers, return_when=asyncio.FIRST_COMPLETED)
            if error := self.incoming.refusal:
                await self._refuse(error)
            while self._answers:
                await asyncio.wait(self._answers)
            if self._write_timer.was_too_long:
                text = f"the client read nothing for {CLIENT_TIMEOUT_S:g} s, its requests are cancelled"
                await self.context.abort(grpc.StatusCode.ABORTED, text)
            if self._is_stopping:
                await self.context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING)
        finally:
            self._write_timer.close()
            for answer in self._answers:
                answer.cancel()

    def stop(self) -> None:
        """Accept no more requests and end when the running ones are answered."""
        self._is_stopping = True
        self.incoming.stop()

    def cut(self, error: RequestError) -> None:
        """End every running request with `error` now."""
        self._cut_by = error
        for answer in self._answers:
            answer.cancel()

    async def _refuse(self, error: RequestError) -> None:
        """Refuse the message that is arriving. Running requests end with the error."""
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
        name, reservation = "", BodyMemoryReservation(self.shared.body_memory)
        try:
            reservation.reserve(len(message))
            async with self.shared.body_memory.reading(len(message)):
                request = parse(message)
                name = request.id
                fresh = self._checked(request)
        except (InvalidInferRequest, RequestError) as error:
            reservation.release()
            await self._write(_refusal(name, error))
            return
        except BaseException:
            reservation.release()
            raise
        answer = asyncio.create_task(self._answer(name, fresh, reservation))
        self._answers.add(answer)
        self.incoming.is_in_use = True
        answer.add_done_callback(self._remove)
        answer.add_done_callback(lambda _: reservation.release())  # also if it is cancelled before it starts

    def _checked(self, request: service_pb2.ModelInferRequest) -> bytes:
        """Return the request that is sent to tritonserver instead of the client's."""
        payload, limit = checked_payload(request), self.shared.max_body_bytes
        if len(payload) > limit:
            text = "The request has {value} bytes, at most MAX_BODY_BYTES({limit}) are taken"
            raise InvalidRequest(text, value=len(payload), limit=limit)
        payload = wire.without_gateway_keys(payload)
        return rewritten(request, wire.payload_with_owner(payload, self.owner))

    async def _answer(self, name: str, request: bytes, reservation: BodyMemoryReservation) -> None:
        try:
            async for response in self._responses(name, request):
                reservation.release()
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

    def _responses(self, name: str, request: bytes) -> AsyncGenerator[bytes, None]:
        """Return the responses to a request: from a replica if there are others and it is one for the model."""
        shared = self.shared
        if shared.replicated:
            body = wire.only_object(checked_payload(parse(request)))
            if not body.keys() & wire.CONTROL_KEYS:
                return _replicated(shared.replicated, name, body)
        return retrying_responses(shared.connections, shared.ready, shared.served, request)

    def _remove(self, answer: asyncio.Task[None]) -> None:
        self._answers.discard(answer)
        self.incoming.is_in_use = bool(self._answers)

    async def _end(self, name: str, error: RequestError) -> None:
        if not self.context.done():
            await self._write(_failure(name, error))

    async def _write(self, message: bytes) -> None:
        """Send a message. Wait until the client has room for it, so that no more is read than it accepts."""
        async with self._writing:
            self._write_timer.start_wait()
            with contextlib.suppress(grpc.aio.InternalError):  # the client has disconnected
                await self.context.write(message)
                self.num_responses += 1
                self.incoming.record_response()
            self._write_timer.end_wait()


def _refusal(name: str, error: InvalidInferRequest | RequestError) -> bytes:
    """Return the error response: in Triton's form for an invalid message, else in the model's form."""
    if isinstance(error, RequestError):
        return _failure(name, error)
    response = service_pb2.ModelStreamInferResponse(error_message=str(error))
    response.infer_response.id = name[:MAX_ID_LEN]
    return response.SerializeToString()


async def _replicated(backend: Backend, name: str, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    try:
        async with contextlib.aclosing(backend.generate(body, RETRY_TIMEOUT_S)) as answers:
            async for answer in answers:
                yield _response(name, answer)
    except RequestError as error:
        yield _response(name, wire.Failure(error, wire.req_id_of(body)), names_in(body))


def _failure(name: str, error: RequestError) -> bytes:
    return _response(name, wire.Failure(error))


def _response(name: str, answer: wire.Answer, names: Mapping[str, str] | None = None) -> bytes:
    """Return the response that tritonserver would send. `names` are those of `native_json`."""
    response = service_pb2.ModelStreamInferResponse()
    inference = response.infer_response
    inference.model_name, inference.model_version, inference.id = MODEL, VERSION, name
    inference.parameters["triton_final_response"].bool_param = answer.is_end
    inference.outputs.add(name=OUTPUT, datatype=DATATYPE, shape=[1])
    inference.raw_output_contents.append(encode_string(wire.native_json(answer, names)))
    return response.SerializeToString()
