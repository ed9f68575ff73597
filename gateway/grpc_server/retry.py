"""Responses to one gRPC request, across restarts of tritonserver."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from tritonclient.grpc import service_pb2

from engine import wire
from engine.errors import EngineUnavailable, RequestError
from engine.settings.served import ServedModel
from engine.wire.triton import encode_string, read_response, write_body
from gateway.backend import ModelLost, ModelUnreachable
from gateway.grpc_server.request import checked_payload, rewritten
from gateway.health import CachedHealthCheck
from gateway.native.request import names_in
from gateway.retry import ReceivedTokens, RetryPolicy
from gateway.triton_connections import TritonConnections

RETRY_TIMEOUT_S = 300.0  # longest wait for tritonserver and its engine to restart


async def retrying_responses(
    connections: TritonConnections, ready: CachedHealthCheck, served: ServedModel, request: bytes
) -> AsyncGenerator[bytes, None]:
    """Yield the responses to `request`.

    After a loss the rest is requested again. Closing the generator cancels the request. Raise RequestError.
    """
    received_tokens, policy, asked = ReceivedTokens(), RetryPolicy(ready, served, RETRY_TIMEOUT_S), request
    is_over = False
    while not is_over:
        await policy.wait_for_turn(received_tokens)
        try:
            with connections.infer(asked) as inference:
                async for response in inference.responses():
                    message = service_pb2.ModelStreamInferResponse.FromString(response)
                    if message.error_message:
                        raise ModelLost("the process of the model has died")
                    if message.infer_response.raw_output_contents:  # Triton's end-of-stream response has no content
                        answer = read_response(message)
                        if _is_unavailable(answer) and policy.is_between_models(received_tokens):
                            raise ModelUnreachable("the model ended before it started the request")
                        if isinstance(answer, wire.Delta) and (answer.token_ids or answer.is_end):
                            policy.record_answer()
                            answer = received_tokens.add(answer)
                        is_over |= answer.is_end
                        message.infer_response.raw_output_contents[0] = _encoded(answer, request)
                        response = message.SerializeToString()
                    yield response
            return
        except ModelUnreachable as error:
            if not is_over:
                await policy.wait(error, received_tokens)
                asked = _rest(request, received_tokens)


def _encoded(answer: wire.Answer, request: bytes) -> bytes:
    """Return the response as the client gets it. Errors have the names by which its request has called the fields."""
    names = names_in(_body_of(request)) if isinstance(answer, wire.Failure) and answer.error.cause else {}
    return encode_string(wire.native_json(answer, names))


def _body_of(message: bytes) -> dict[str, Any]:
    """Return the JSON object of a request, or an empty one if it has none."""
    try:
        return wire.only_object(checked_payload(service_pb2.ModelInferRequest.FromString(message)))
    except RequestError:
        return {}


def _is_unavailable(answer: wire.Answer) -> bool:
    return isinstance(answer, wire.Failure) and isinstance(answer.error, EngineUnavailable)


def _rest(message: bytes, received_tokens: ReceivedTokens) -> bytes:
    request = service_pb2.ModelInferRequest.FromString(message)
    return rewritten(request, write_body(received_tokens.rest(wire.only_object(checked_payload(request)))))
