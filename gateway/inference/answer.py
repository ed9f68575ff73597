"""The responses to one request, as tritonserver makes them. Reads of them only what it takes to go on with another
tritonserver when the first has died."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from tritonclient.grpc import service_pb2

from engine import wire
from engine.settings.served import ServedModel
from engine.wire.triton import write_body
from gateway.backend import ModelLost, ModelUnreachable
from gateway.connections import Connections
from gateway.health import Shared
from gateway.inference.request import payload_of, rewritten
from gateway.lasting import Known, Patience

PATIENCE_S = 300.0  # for a tritonserver that has died, and its engine
ERROR_MESSAGE = b"\x0a"  # a response begins so when it is Triton's own word: tag 1, a text


async def lasting_responses(
    connections: Connections, ready: Shared, served: ServedModel, request: bytes
) -> AsyncGenerator[bytes, None]:
    """`request` is asked again for what has not come. Closing the generator cancels it. Raises RequestError."""
    known, patience, asked = Known(), Patience(ready, served, PATIENCE_S), request
    is_over = False
    while not is_over:
        await patience.wait_for_turn(known)
        try:
            with connections.infer(asked) as inference:
                async for response in inference.responses():
                    if response.startswith(ERROR_MESSAGE):
                        raise ModelLost("the process of the model has died")
                    if glance := wire.glance_at(response):
                        patience.was_answered()
                        known.add(glance)
                        is_over |= glance.is_end
                    yield response
            return
        except ModelUnreachable as error:
            if not is_over:
                await patience.wait(error, known)
                asked = _rest(request, known)


def _rest(message: bytes, known: Known) -> bytes:
    request = service_pb2.ModelInferRequest.FromString(message)
    return rewritten(request, write_body(known.rest(wire.only_object(payload_of(request)))))
