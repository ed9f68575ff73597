"""The responses to one request in the native JSON. When tritonserver dies, another goes on with it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from tritonclient.grpc import service_pb2

from engine import wire
from engine.errors import EngineUnavailable
from engine.settings.served import ServedModel
from engine.wire.triton import as_string, read_response, write_body
from gateway.backend import ModelLost, ModelUnreachable
from gateway.grpc_server.request import payload_of, rewritten
from gateway.health import CachedHealthCheck
from gateway.retry import ReceivedTokens, RetryPolicy
from gateway.triton_connections import TritonConnections

PATIENCE_S = 300.0  # for a tritonserver that has died, and its engine


async def retrying_responses(
    connections: TritonConnections, ready: CachedHealthCheck, served: ServedModel, request: bytes
) -> AsyncGenerator[bytes, None]:
    """`request` is asked again for what has not come. Closing the generator cancels it. Raises RequestError."""
    known, patience, asked = ReceivedTokens(), RetryPolicy(ready, served, PATIENCE_S), request
    is_over = False
    while not is_over:
        await patience.wait_for_turn(known)
        try:
            with connections.infer(asked) as inference:
                async for response in inference.responses():
                    message = service_pb2.ModelStreamInferResponse.FromString(response)
                    if message.error_message:
                        raise ModelLost("the process of the model has died")
                    if message.infer_response.raw_output_contents:  # Triton's end of a stream has none
                        answer = read_response(message)
                        if _is_unavailable(answer) and patience.is_between_models(known):
                            raise ModelUnreachable("the model has ended it before it was begun")
                        if isinstance(answer, wire.Delta) and (answer.token_ids or answer.is_end):
                            patience.was_answered()
                            known.add(answer)
                        is_over |= answer.is_end
                        message.infer_response.raw_output_contents[0] = as_string(wire.native_json(answer))
                        response = message.SerializeToString()
                    yield response
            return
        except ModelUnreachable as error:
            if not is_over:
                await patience.wait(error, known)
                asked = _rest(request, known)


def _is_unavailable(answer: wire.Answer) -> bool:
    return isinstance(answer, wire.Failure) and isinstance(answer.error, EngineUnavailable)


def _rest(message: bytes, known: ReceivedTokens) -> bytes:
    request = service_pb2.ModelInferRequest.FromString(message)
    return rewritten(request, write_body(known.rest(wire.only_object(payload_of(request)))))
