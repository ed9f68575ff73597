"""Methods of the gRPC server that only other replicas may call: polls, and requests for the model of this server.

The front end has checked the request and knows its owner. Responses of the model are forwarded as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
import msgspec
from tritonclient.grpc import service_pb2

from engine import wire
from engine.errors import EngineUnavailable, RequestError
from engine.wire.triton import payload_of
from gateway.grpc_server.message_limits import IncomingMessages
from gateway.grpc_server.request import InvalidInferRequest, checked_payload, parse
from gateway.replicas.connections import FRONT_END, INFER, POLL, TOKEN
from gateway.replicas.replica_set import ReplicaSet
from gateway.replicas.served import read_poll, write
from gateway.triton_connections import TritonConnections

MESSAGE_TIMEOUT_S = 10.0  # longest wait for the message of a call
Respond = Callable[[IncomingMessages, grpc.aio.ServicerContext], Awaitable[None]]


class ReplicaMethods:
    """The service `llm.Replicas` of one server."""

    def __init__(self, replicas: ReplicaSet, connections: TritonConnections):
        self._replicas, self._connections = replicas, connections
        self.methods: dict[str, Respond] = {POLL: self._poll, INFER: self._infer}

    def is_replica(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Return whether the caller has the same API keys as this server."""
        return hmac.compare_digest(_value(TOKEN, metadata).encode(), self._replicas.token.encode())

    async def _poll(self, incoming: IncomingMessages, context: grpc.aio.ServicerContext) -> None:
        message = await incoming.next(MESSAGE_TIMEOUT_S) or b""  # EOF is falsy
        try:
            poll = read_poll(message)
        except msgspec.DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message is no poll of this version")
        await context.write(write(await self._replicas.summary(poll)))

    async def _infer(self, incoming: IncomingMessages, context: grpc.aio.ServicerContext) -> None:
        message = await incoming.next(MESSAGE_TIMEOUT_S) or b""
        incoming.is_in_use = True
        front_end = _value(FRONT_END, context.invocation_metadata() or ())
        try:
            with self._connections.infer(message) as call:
                await asyncio.sleep(0)  # it is sent before its prompt is hashed
                body = _body(message)
                with self._replicas.served.forwarded(body, front_end) as request:
                    async for response in call.responses():
                        request.num_tokens = 0
                        if isinstance(stream := body.get(wire.SHARE), str):
                            self._note_first_answers(stream, response)
                        await context.write(response)
        except EngineUnavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except RequestError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))

    def _note_first_answers(self, stream: str, response: bytes) -> None:
        """Note which requests have their first answer in a response on a shared stream."""
        if waiting := self._replicas.served.waiting(stream):
            with contextlib.suppress(RequestError):  # the front end gets it
                shared = wire.read_shared(payload_of(service_pb2.ModelStreamInferResponse.FromString(response)))
                for tag, _ in shared.answers if isinstance(shared, wire.SharedAnswers) else ():
                    if request := waiting.get(tag):
                        request.num_tokens = 0


def _body(message: bytes) -> dict[str, Any]:
    with contextlib.suppress(InvalidInferRequest, RequestError):  # the model refuses it
        return wire.only_object(checked_payload(parse(message)))
    return {}


def _value(wanted: str, metadata: Iterable[tuple[str, str | bytes]]) -> str:
    value = next((value for name, value in metadata if name == wanted), "")
    return value if isinstance(value, str) else ""
