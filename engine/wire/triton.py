"""Transport of engine.wire by Triton's gRPC: a string in the tensor IN of a request and in the output of each response.

This is the client's side; model_repository/model is the other one.
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


# The encoded text is not longer than what the client has written, whose length was checked.
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)


def infer_request(body: dict[str, Any]) -> service_pb2.ModelInferRequest:
    """Return the gRPC request for a JSON object."""
    return request_of(write_body(body))


def write_body(body: dict[str, Any]) -> bytes:
    """Return the JSON text of a request: a list with one object."""
    return ENCODER.encode([body]).encode("utf-8", "surrogatepass")


def request_of(payload: bytes, name: str = "") -> service_pb2.ModelInferRequest:
    """Return the gRPC request for a JSON text. `name` is its id, which Triton returns with every response."""
    request = service_pb2.ModelInferRequest(model_name=MODEL, id=name)
    request.inputs.add(name=INPUT, datatype=DATATYPE, shape=[1])
    request.raw_input_contents.append(encode_string(payload))
    return request


def encode_string(payload: bytes) -> bytes:
    """Encode a string as the only element of a BYTES tensor."""
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def read_response(response: service_pb2.ModelStreamInferResponse) -> wire.Answer:
    """Return the model's response, which may be a Failure. Raises EngineUnavailable if Triton answered instead."""
    return wire.read_answer(payload_of(response))


def payload_of(response: service_pb2.ModelStreamInferResponse) -> bytes:
    """Return the encoded response of the model. Raises EngineUnavailable if Triton answered instead."""
    if response.error_message:  # from Triton itself: the model is not loaded, or its process has died
        raise EngineUnavailable(f"the model server failed: {response.error_message}")
    result = response.infer_response
    if contents := result.raw_output_contents:
        end = LENGTH_BYTES + int.from_bytes(contents[0][:LENGTH_BYTES], "little")
        return contents[0][LENGTH_BYTES:end]  # padding may follow, see server_scripts/backend_utils_numpy2.py
    if result.outputs and result.outputs[0].contents.bytes_contents:
        return result.outputs[0].contents.bytes_contents[0]
    raise EngineUnavailable("the model sent an empty response")
