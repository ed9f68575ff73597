"""How the JSON of engine.wire travels in Triton's gRPC: as one string, in the tensor IN and in each response's output.

For those who ask the model; the other end is model_repository/model.
"""

from __future__ import annotations

import json
from typing import Any

from tritonclient.grpc import service_pb2

from engine import wire
from engine.errors import EngineUnavailable

MODEL, VERSION = "model", "1"
INPUT, OUTPUT, DATATYPE = "IN", "OUT", "BYTES"
LENGTH_BYTES = 4  # before each string of a tensor, little-endian


# Not longer than what the client has written, as its length was checked there.
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)


def infer_request(body: dict[str, Any]) -> service_pb2.ModelInferRequest:
    return request_of(write_body(body))


def write_body(body: dict[str, Any]) -> bytes:
    return ENCODER.encode([body]).encode("utf-8", "surrogatepass")


def request_of(payload: bytes, name: str = "") -> service_pb2.ModelInferRequest:
    """`name` comes back with every response."""
    request = service_pb2.ModelInferRequest(model_name=MODEL, id=name)
    request.inputs.add(name=INPUT, datatype=DATATYPE, shape=[1])
    request.raw_input_contents.append(as_string(payload))
    return request


def as_string(payload: bytes) -> bytes:
    """As the one element of a tensor."""
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def read_response(response: service_pb2.ModelStreamInferResponse) -> wire.Answer:
    """What the model has sent, a failure, too. Raises EngineUnavailable when it is not the model's."""
    return wire.read_answer(payload_of(response))


def payload_of(response: service_pb2.ModelStreamInferResponse) -> bytes:
    """Raises EngineUnavailable when it is not the model's."""
    if response.error_message:  # Triton's own words: the model is not loaded, its process has died
        raise EngineUnavailable(f"the model server failed: {response.error_message}")
    result = response.infer_response
    if contents := result.raw_output_contents:
        return contents[0][LENGTH_BYTES:]
    if result.outputs and result.outputs[0].contents.bytes_contents:
        return result.outputs[0].contents.bytes_contents[0]
    raise EngineUnavailable("the model sent an empty response")
