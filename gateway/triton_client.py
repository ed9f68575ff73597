"""The model behind Triton's gRPC, as the protocols see it: one call a request, its answers read. Knows no HTTP."""

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

PROBE_TIMEOUT_S = 60.0  # whoever probes has a shorter one
END_TIMEOUT_S = 5.0  # for the end of the stream after the final response


class TritonBackend:
    """A `gateway.backend.Backend`. Belongs to the event loop it is first used in."""

    def __init__(self, connections: TritonConnections):
        self._connections = connections
        self._shared: SharedStream | None = None

    def generate(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[wire.Delta, None]:
        if stream := self._stream_for(body):
            return self._ask_sharing(stream, body, timeout_s)
        return cast("AsyncGenerator[wire.Delta, None]", self._ask(body, timeout_s))  # a probe alone has other answers

    def _stream_for(self, body: dict[str, Any]) -> SharedStream | None:
        """To share, where others run. Of several choices the last to end has to come last, and who goes on has tokens
        that are not counted here: these do not share. Nor does a response that outlives its connection."""
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
        with stream.join(body) as (body, arrivals):
            own = asyncio.create_task(self._forward(body, arrivals))
            error = _silent(timeout_s)
            silence = IdleTimer(lambda: arrivals.fail(error), timeout_s)
            try:
                while True:
                    answer = await arrivals.next()
                    silence.ends()
                    if isinstance(answer, wire.Failure):
                        await own
                        raise answer.error
                    yield answer
                    if answer.is_end:
                        await own
                        return
                    silence.begins()
            finally:
                silence.close()
                own.cancel()

    async def _forward(self, body: dict[str, Any], arrivals: ReorderBuffer) -> None:
        """What comes on the request's own stream, its end above all."""
        try:
            with self._connections.infer(infer_request(body).SerializeToString()) as inference:
                async with contextlib.aclosing(inference.responses()) as responses:
                    async for response in responses:
                        answer = _read(response)
                        assert isinstance(answer, wire.Delta | wire.Failure)
                        arrivals.put(answer)
                        if answer.is_end:
                            await _read_to_end(responses)
                            return
            raise ModelLost("the model ended the stream without a final response")
        except asyncio.CancelledError:
            if not self._connections.is_closed:
                raise
            arrivals.fail(EngineUnavailable("the gateway is stopping"))
        except Exception as error:
            arrivals.fail(error)

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
        silence = IdleTimer(inference.cancel, timeout_s)  # time in which nobody asks for a response does not count
        try:
            async for response in inference.responses():
                silence.ends()
                yield response
                silence.begins()
        except asyncio.CancelledError:
            if silence.was_too_long:
                raise _silent(timeout_s) from None
            if self._connections.is_closed:
                raise EngineUnavailable("the gateway is stopping") from None
            raise
        finally:
            silence.close()

    async def probe(self, with_metrics: bool = False) -> wire.ModelState:
        state = await self._one_answer({wire.PROBE: wire.METRICS if with_metrics else True})
        assert isinstance(state, wire.ModelState)
        return state

    async def abort(self, req_id: str, owner: wire.Owner) -> wire.Aborted:
        aborted = await self._one_answer(wire.with_owner({wire.ABORT: req_id}, owner))
        assert isinstance(aborted, wire.Aborted)
        return aborted

    async def about_tokens(self, question: dict[str, Any]) -> wire.Tokenized | wire.Detokenized:
        told = await self._one_answer(question)
        assert isinstance(told, (wire.Tokenized, wire.Detokenized))
        return told

    async def change_loras(self, question: dict[str, Any], owner: wire.Owner) -> wire.Loras:
        loras = await self._one_answer(wire.with_owner(question, owner))
        assert isinstance(loras, wire.Loras)
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


def _silent(timeout_s: float) -> TimedOut:
    return TimedOut("the model sent no response for {limit} s, the request is cancelled", limit=float(timeout_s))


def _read(response: bytes) -> wire.Answer:
    try:
        return read_response(service_pb2.ModelStreamInferResponse.FromString(response))
    except EngineUnavailable as error:  # in Triton's own words: the model's process has died
        raise ModelLost(error.text) from None


async def _read_to_end(responses: AsyncIterator[Any]) -> None:
    """Let the stream end by itself: cancelling it now could race with its end inside Triton."""
    with contextlib.suppress(asyncio.TimeoutError, RequestError):
        async with timeout(END_TIMEOUT_S):
            async for _ in responses:
                pass
