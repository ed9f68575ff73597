"""The model behind Triton's gRPC, as the protocols see it: one call a request, its answers read. Knows no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import grpc
from tritonclient.grpc import service_pb2

from engine import wire
from engine.errors import (
    Cancelled,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    RequestError,
    TimedOut,
)
from engine.wire.triton import infer_request, read_response
from gateway.backend import timeout
from gateway.connections import SERVICE, Connections, failure
from gateway.silence import Silence

PROBE_TIMEOUT_S = 60.0  # whoever probes has a shorter one
END_TIMEOUT_S = 5.0  # for the end of the stream after the final response

ERRORS: dict[grpc.StatusCode, type[RequestError]] = {
    grpc.StatusCode.UNAVAILABLE: EngineUnavailable,
    grpc.StatusCode.NOT_FOUND: EngineUnavailable,  # the model is not loaded
    grpc.StatusCode.FAILED_PRECONDITION: EngineUnavailable,
    grpc.StatusCode.ABORTED: EngineUnavailable,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOut,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
}


class TritonBackend:
    """A `gateway.backend.Backend`. Belongs to the event loop it is first used in."""

    def __init__(self, connections: Connections):
        self._connections = connections

    def generate(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[wire.Delta, None]:
        return cast("AsyncGenerator[wire.Delta, None]", self._ask(body, timeout_s))  # a probe alone has other answers

    async def _ask(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[wire.Answer, None]:
        with self._connections.infer(infer_request(body).SerializeToString()) as call:
            async with contextlib.aclosing(self._responses(call, timeout_s)) as responses:
                async for response in responses:
                    answer = read_response(response)
                    if isinstance(answer, wire.Failure):
                        await _read_to_end(responses)
                        raise answer.error
                    yield answer
                    if answer.is_end:
                        await _read_to_end(responses)
                        return
            raise EngineUnavailable("the model ended the stream without a final response")

    async def _responses(self, call: Any, timeout_s: float) -> AsyncGenerator[Any, None]:
        """Triton's responses to one request, gRPC's errors translated."""
        silence = Silence(call.cancel, timeout_s)  # time in which nobody asks for a response does not count
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                silence.ends()
                yield service_pb2.ModelStreamInferResponse.FromString(response)
                silence.begins()
        except grpc.aio.AioRpcError as error:
            raise ERRORS.get(error.code(), RequestError)(failure(error)) from None
        except asyncio.CancelledError:
            if silence.was_too_long:
                text = "the model sent no response for {limit} s, the request is cancelled"
                raise TimedOut(text, limit=float(timeout_s)) from None
            if self._connections.is_closed:
                raise EngineUnavailable("the gateway is stopping") from None
            raise
        finally:
            silence.close()

    async def probe(self) -> wire.ModelState:
        async with contextlib.aclosing(self._ask({wire.PROBE: True}, PROBE_TIMEOUT_S)) as answers:
            [state] = [answer async for answer in answers]
        assert isinstance(state, wire.ModelState)
        return state

    async def is_live(self) -> bool:
        try:
            response = await self._connections.ask(f"{SERVICE}/ServerLive", b"", PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return service_pb2.ServerLiveResponse.FromString(response).live

    async def close(self) -> None:
        await self._connections.close()


async def _read_to_end(responses: AsyncIterator[Any]) -> None:
    """Let the stream end by itself: cancelling it now could race with its end inside Triton."""
    with contextlib.suppress(asyncio.TimeoutError, RequestError):
        async with timeout(END_TIMEOUT_S):
            async for _ in responses:
                pass
