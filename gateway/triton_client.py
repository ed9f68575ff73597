"""Client of the model behind Triton's gRPC service: one call per request. It is independent of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import grpc
from tritonclient.grpc import service_pb2

from engine import wire
from engine.errors import EngineUnavailable, RequestError, TimedOut
from engine.wire.triton import infer_request, read_response
from gateway.backend import ModelLost, timeout
from gateway.idle_timer import IdleTimer
from gateway.shared_stream import ReorderBuffer, SharedStream
from gateway.triton_connections import SERVICE, InferCall, TritonConnections

PROBE_TIMEOUT_S = 60.0  # callers have shorter timeouts
END_TIMEOUT_S = 5.0  # for the end of the stream after the final response


class TritonBackend:
    """Backend (`gateway.backend.Backend`) over Triton. It belongs to the event loop in which it is first used."""

    def __init__(self, connections: TritonConnections):
        self._connections = connections
        self._shared: SharedStream | None = None

    def generate(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[wire.Delta, None]:
        if stream := self._stream_for(body):
            return self._ask_sharing(stream, body, timeout_s)
        return cast("AsyncGenerator[wire.Delta, None]", self._ask(body, timeout_s))  # only a probe has other answers

    def _stream_for(self, body: dict[str, Any]) -> SharedStream | None:
        """Return the shared stream for a request, or None if it must have its own.

        A stream is shared only while other requests run. Several choices need their last end to arrive last, a resumed
        request has tokens that are not counted here, and a background response outlives its connection; these do not
        share.
        """
        if not self._connections.num_running or body.get("n") not in (None, 1):
            return None
        if body.get("resume_from") is not None or body.get(wire.STORE, {}).get("is_background"):
            return None
        if self._shared is None or not self._shared.is_open:
            self._shared = SharedStream(self._connections)
        return self._shared

    async def _ask_sharing(
        self, stream: SharedStream, body: dict[str, Any], timeout_s: float
    ) -> AsyncGenerator[wire.Delta, None]:
        with stream.join(body) as (body, buffer):
            own = asyncio.create_task(self._forward(body, buffer))
            error = _timed_out(timeout_s)
            idle_timer = IdleTimer(lambda: buffer.fail(error), timeout_s)
            try:
                while True:
                    answer = await buffer.next()
                    idle_timer.end_wait()
                    if isinstance(answer, wire.Failure):
                        await own
                        raise answer.error
                    yield answer
                    if answer.is_end:
                        await own
                        return
                    idle_timer.start_wait()
            finally:
                idle_timer.close()
                own.cancel()

    async def _forward(self, body: dict[str, Any], buffer: ReorderBuffer) -> None:
        """Read the request's own stream, on which at least its end arrives, into `buffer`."""
        try:
            with self._connections.infer(infer_request(body).SerializeToString()) as inference:
                async with contextlib.aclosing(inference.responses()) as responses:
                    async for response in responses:
                        answer = _read(response)
                        assert isinstance(answer, wire.Delta | wire.Failure)
                        buffer.put(answer)
                        if answer.is_end:
                            await _read_to_end(responses)
                            return
            raise ModelLost("the model ended the stream without a final response")
        except asyncio.CancelledError:
            if not self._connections.is_closed:
                raise
            buffer.fail(EngineUnavailable("the gateway is stopping"))
        except Exception as error:
            buffer.fail(error)

    async def _ask(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[wire.Answer, None]:
        with self._connections.infer(infer_request(body).SerializeToString()) as inference:
            async with contextlib.aclosing(self._in_time(inference, timeout_s)) as responses:
                async for response in responses:
                    answer = _read(response)
                    if isinstance(answer, wire.Failure):
                        await _read_to_end(responses)
                        raise answer.error
                    yield answer
                    if answer.is_end:
                        await _read_to_end(responses)
                        return
            raise ModelLost("the model ended the stream without a final response")

    async def _in_time(self, inference: InferCall, timeout_s: float) -> AsyncGenerator[bytes, None]:
        idle_timer = IdleTimer(inference.cancel, timeout_s)  # time in which no response is requested does not count
        try:
            async for response in inference.responses():
                idle_timer.end_wait()
                yield response
                idle_timer.start_wait()
        except asyncio.CancelledError:
            if idle_timer.was_too_long:
                raise _timed_out(timeout_s) from None
            if self._connections.is_closed:
                raise EngineUnavailable("the gateway is stopping") from None
            raise
        finally:
            idle_timer.close()

    async def probe(self, with_metrics: bool = False) -> wire.ModelState:
        state = await self._one_answer({wire.PROBE: wire.METRICS if with_metrics else True})
        assert isinstance(state, wire.ModelState)
        return state

    async def abort(self, req_id: str, owner: wire.Owner) -> wire.Aborted:
        aborted = await self._one_answer(wire.with_owner({wire.ABORT: req_id}, owner))
        assert isinstance(aborted, wire.Aborted)
        return aborted

    async def tokenize_or_detokenize(self, body: dict[str, Any]) -> wire.TokenizeResponse | wire.DetokenizeResponse:
        answer = await self._one_answer(body)
        assert isinstance(answer, (wire.TokenizeResponse, wire.DetokenizeResponse))
        return answer

    async def change_loras(self, body: dict[str, Any], owner: wire.Owner) -> wire.LoraList:
        loras = await self._one_answer(wire.with_owner(body, owner))
        assert isinstance(loras, wire.LoraList)
        return loras

    async def stored_response(self, body: dict[str, Any]) -> wire.StoredResponse:
        response = await self._one_answer(body)
        assert isinstance(response, wire.StoredResponse)
        return response

    async def _one_answer(self, body: dict[str, Any]) -> wire.Answer:
        async with contextlib.aclosing(self._ask(body, PROBE_TIMEOUT_S)) as answers:
            [answer] = [answer async for answer in answers]
        return answer

    async def is_live(self) -> bool:
        try:
            response = await self._connections.ask(f"{SERVICE}/ServerLive", b"", PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return service_pb2.ServerLiveResponse.FromString(response).live

    async def close(self) -> None:
        await self._connections.close()


def _timed_out(timeout_s: float) -> TimedOut:
    return TimedOut("the model sent no response for {limit} s, the request is cancelled", limit=float(timeout_s))


def _read(response: bytes) -> wire.Answer:
    try:
        return read_response(service_pb2.ModelStreamInferResponse.FromString(response))
    except EngineUnavailable as error:  # Triton's own error text: the model's process has died
        raise ModelLost(error.text) from None


async def _read_to_end(responses: AsyncIterator[object]) -> None:
    """Wait until the stream ends by itself: cancelling it now could race with its end inside Triton."""
    with contextlib.suppress(asyncio.TimeoutError, RequestError):
        async with timeout(END_TIMEOUT_S):
            async for _ in responses:
                pass
